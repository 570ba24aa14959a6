"""Lookup, sums of duplicates and update by the C++ kernels; the contract is ``torch_lookup.py``'s.

All run on ``torch.get_num_threads()`` threads and give the same bits for any number of them.
"""

from __future__ import annotations

from typing import Any

import torch

from recsys_basis.embeddings.features import Bags, Features, RowGradients
from recsys_basis.embeddings.weights import Weights
from recsys_basis.kernels import rules, stored
from recsys_basis.kernels.extension import load
from recsys_basis.row_optimizers.base import RowOptimizer
from recsys_basis.row_optimizers.clipping import RowClip


class CppLookup:
    """Works on a CPU. Raises ImportError where the kernels were not compiled."""

    def __init__(self, features: Features) -> None:
        load()
        self.features = features

    def prepare(self, weights: torch.Tensor, optimizer: RowOptimizer) -> None:
        """Ask the system to keep weights and state in huge pages, since rows are read at random."""
        for tensor in (weights, *(state.tensor for state in optimizer.state.values())):
            load().advise_huge_pages(tensor)

    def pool(self, weights: torch.Tensor, bags: Bags) -> torch.Tensor:
        """As ``TorchLookup.pool``, in one pass."""
        num_features = len(self.features.tables)
        batch_size = (bags.offsets.numel() - 1) // num_features
        pooled = torch.empty(batch_size, num_features * weights.shape[1])
        wrong = load().lookup(weights=weights, pooled=pooled, **self._of(bags))
        if wrong >= 0:
            bag = int(torch.searchsorted(bags.offsets, wrong, right=True)) - 1
            raise self.features.out_of_range(bag // batch_size, int(bags.indices[wrong]))
        return pooled

    def sum_by_row(self, gradient: torch.Tensor, bags: Bags, with_counts: bool) -> RowGradients:
        """As ``TorchLookup.sum_by_row``, reading ``gradient`` where it is."""
        return RowGradients(
            *load().sum_by_row(gradient=_plain(gradient), with_counts=with_counts, **self._of(bags))
        )

    def per_sample_gradient(self, gradient: torch.Tensor, weights: torch.Tensor, bags: Bags) -> torch.Tensor:
        """As ``TorchLookup.per_sample_gradient``."""
        result = torch.empty(bags.indices.numel())
        load().per_sample_gradient(
            gradient=_plain(gradient), weights=weights, result=result, **self._of(bags)
        )
        return result

    def clip(self, clip: RowClip, weights: Weights, gradients: RowGradients) -> None:
        """As ``TorchLookup.clip``."""
        tensor, rows = weights.tensor, gradients.rows
        if tensor.dtype != torch.float32:
            tensor, rows = stored.read(weights, rows), torch.arange(len(rows))
        load().clip_rows(
            weights=tensor,
            rows=rows,
            gradients=gradients.sums,
            counts=gradients.counts,
            max_norm=clip.max_norm,
            cowclip_ratio=clip.cowclip_ratio,
            cowclip_min_norm=clip.cowclip_min_norm,
            threads=torch.get_num_threads(),
        )

    def update(
        self,
        optimizer: RowOptimizer,
        weights: Weights,
        gradients: RowGradients,
        learning_rate: float,
    ) -> None:
        """As ``TorchLookup.update``; float32 weights change where they are."""
        rows, summed = gradients.rows, gradients.summed
        if weights.tensor.dtype == torch.float32:
            rules.update(optimizer, weights.tensor, rows, summed, learning_rate)
            return
        touched = stored.read(weights, rows)
        rules.update(optimizer, touched, rows, summed, learning_rate)
        stored.write(weights, rows, touched, weights.updates.advance(rows))

    def _of(self, bags: Bags) -> dict[str, Any]:
        weights = bags.per_sample_weights
        return {
            "indices": _plain(bags.indices),
            "offsets": _plain(bags.offsets),
            "per_sample_weights": None if weights is None else _plain(weights),
            "feature_starts": self.features.starts,
            "feature_sizes": self.features.sizes,
            "mean": self.features.pooling == "mean",
            "threads": torch.get_num_threads(),
        }


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # A collective's result may be a wrapper, still in flight and without memory: an operator waits for it.
    return tensor if type(tensor) is torch.Tensor else tensor.clone()
