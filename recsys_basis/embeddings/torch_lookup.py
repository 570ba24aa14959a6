"""Lookup, sums of duplicates and update in plain PyTorch: the truth that the C++ kernels answer to.

Each step is one pass of a torch operator over all features of a group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from recsys_basis.embeddings.features import Bags, Features, RowGradients
from recsys_basis.embeddings.weights import Weights
from recsys_basis.row_optimizers.base import RowOptimizer
from recsys_basis.row_optimizers.clipping import RowClip, clip_rows
from recsys_basis.segments import Segments


class TorchLookup:
    """Works on any device."""

    def __init__(self, features: Features) -> None:
        self.features = features

    def prepare(self, weights: torch.Tensor, optimizer: RowOptimizer) -> None:
        """Before the first batch: nothing to do."""

    def pool(self, weights: torch.Tensor, bags: Bags) -> torch.Tensor:
        """Pooled vectors [B, F * D] float32 of ``weights`` [R, D]; IndexError for a row out of range."""
        rows = self._rows(bags)
        if weights.dtype != torch.float32:  # else it would add up in ``weights.dtype``
            weights, rows = weights[rows].float(), torch.arange(len(rows), device=rows.device)
        pooled = F.embedding_bag(
            rows,
            weights,
            bags.offsets,
            mode="sum",
            per_sample_weights=bags.per_sample_weights,
            include_last_offset=True,
        )
        if self.features.pooling == "mean":
            pooled /= bags.offsets.diff().clamp(min=1).unsqueeze(1)
        num_features = len(self.features.tables)
        batch_size, width = len(pooled) // num_features, weights.shape[1]
        by_feature = pooled.view(num_features, batch_size, width)
        return by_feature.transpose(0, 1).reshape(batch_size, num_features * width)

    def sum_by_row(self, gradient: torch.Tensor, bags: Bags, with_counts: bool) -> RowGradients:
        """The gradient of each distinct row, from ``gradient`` [B, F * D] of the pooled vectors."""
        segments = Segments.of(self._rows(bags))
        by_bag, bag_of_item = self._by_bag(gradient, bags)
        sums = segments.sum(by_bag, bag_of_item, bags.per_sample_weights)
        finite = bool(torch.isfinite(sums.square().sum()))
        return RowGradients(segments.keys, sums, finite, segments.counts if with_counts else None)

    def per_sample_gradient(self, gradient: torch.Tensor, weights: torch.Tensor, bags: Bags) -> torch.Tensor:
        """Gradient [L] of the per-sample weights."""
        by_bag, bag_of_item = self._by_bag(gradient, bags)
        return (by_bag[bag_of_item] * weights[self._rows(bags)]).sum(1)

    def clip(self, clip: RowClip, weights: Weights, gradients: RowGradients) -> None:
        """Shorten ``gradients.sums`` in place."""
        clip_rows(clip, weights.read(gradients.rows), gradients.sums, gradients.counts)

    def update(
        self,
        optimizer: RowOptimizer,
        weights: Weights,
        gradients: RowGradients,
        learning_rate: float,
    ) -> None:
        """One step of ``optimizer``."""
        rows = gradients.rows
        touched = weights.read(rows)
        optimizer.update(touched, rows, gradients.sums, learning_rate)
        weights.write(rows, touched, weights.updates.advance(rows))

    def _rows(self, bags: Bags) -> torch.Tensor:
        """Group rows [L] int64."""
        num_features, indices = len(self.features.tables), bags.indices.long()
        batch_size = (bags.offsets.numel() - 1) // num_features
        ends = bags.offsets[::batch_size] if batch_size else bags.offsets.expand(num_features + 1)
        feature_of_item = torch.arange(num_features, device=indices.device).repeat_interleave(ends.diff())
        wrong = (indices < 0) | (indices >= self.features.sizes[feature_of_item])
        if wrong.any():
            item = int(wrong.nonzero()[0])
            raise self.features.out_of_range(int(feature_of_item[item]), int(indices[item]))
        return indices + self.features.starts[feature_of_item]

    def _by_bag(self, gradient: torch.Tensor, bags: Bags) -> tuple[torch.Tensor, torch.Tensor]:
        """What each item of a bag adds [F * B, D], and the bag of each item [L]."""
        num_features, sizes = len(self.features.tables), bags.offsets.diff()
        by_feature = gradient.view(len(gradient), num_features, gradient.shape[1] // num_features)
        by_bag = by_feature.transpose(0, 1).flatten(0, 1)
        if self.features.pooling == "mean":
            by_bag = by_bag / sizes.clamp(min=1).unsqueeze(1)
        return by_bag, torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
