"""Table-batched embedding bags that apply a row optimizer inside backward.

One lookup serves all tables of a group. Backward sums the gradients of each distinct row,
so the row optimizer sees [U, D], and no gradient of table size [R, D] ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recsys_basis.embeddings.features import Features, Pooling, RowGradients
from recsys_basis.embeddings.operators import lookup, lookup_and_update, lookup_of, number_of
from recsys_basis.embeddings.replicas import mean_over_replicas
from recsys_basis.embeddings.spec import BagsKernel, WeightDtype
from recsys_basis.embeddings.weights import Weights
from recsys_basis.errors import NonFiniteError
from recsys_basis.row_optimizers import create_row_optimizer
from recsys_basis.row_optimizers.base import RowOptimizerConfig, State
from recsys_basis.row_optimizers.storage import DTYPES
from recsys_basis.tables import TableShard


class RowOptimizedEmbeddingBags(nn.Module):
    """All table shards of one group on one rank, and the optimizer state of their rows.

    shards              the group's table shards, all of width D, in storage order
    shard_of_feature    for each of the F features, the index of its table in ``shards``
    row_optimizer       which rule updates the rows, and its settings
    pooling             "sum", or "mean": the sum divided by the number of ids in the bag
                        (also with per-sample weights, as TorchRec's table-wise sharding does)
    hold_gradients      False: rows change inside backward. True: backward leaves their gradients
                        in ``held`` until ``apply_held``, so that a norm over all gradients can be
                        taken first
    kernel              "torch", or "cpp": the compiled kernels, on a CPU, for rules that have one
    replicas            ranks that hold the same rows, whose gradients are averaged before the update
    weight_dtype        how weights are kept; bags are summed and rows updated in float32, then rounded
                        stochastically (recsys_basis.row_optimizers.storage)

    ``learning_rate`` is read at each update; set it before backward.
    """

    def __init__(
        self,
        shards: Sequence[TableShard],
        shard_of_feature: Sequence[int],
        row_optimizer: RowOptimizerConfig,
        pooling: Pooling = "sum",
        hold_gradients: bool = False,
        device: torch.device | str = "cpu",
        kernel: BagsKernel = "torch",
        replicas: dist.ProcessGroup | None = None,
        weight_dtype: WeightDtype = "float32",
    ) -> None:
        super().__init__()
        self.row_optimizer = create_row_optimizer(row_optimizer, shards, device)
        self.learning_rate = row_optimizer.learning_rate
        self.hold_gradients = hold_gradients
        self.replicas = replicas
        self.held: RowGradients | None = None
        self.fault: str | None = None
        """Why backward has left rows as they were: set there, taken by whoever answers for it. Raised in
        backward itself it would leave other ranks waiting in theirs."""
        self.observer: Callable[[torch.Tensor], None] | None = None
        """Sees the distinct rows of each update before they change (recsys_basis.diagnostics)."""
        self.clip = row_optimizer.clip
        self.embedding_dim = self.row_optimizer.embedding_dim
        # A plain tensor: as a Parameter it would ask autograd for a gradient of table size.
        self.weights = torch.empty(
            self.row_optimizer.num_rows, self.embedding_dim, dtype=DTYPES[weight_dtype], device=device
        )
        self.stored = Weights(self.weights, shards)
        if weight_dtype != "float32":  # with the rule's own state into checkpoints
            self.row_optimizer.state["weight_updates"] = State(self.stored.updates.count, "table")
        self.features = Features.of(shards, self.row_optimizer.row_starts, shard_of_feature, pooling, device)
        self.kernel = kernel
        self.lookup = lookup_of(kernel, self.features)
        self.lookup.prepare(self.weights, self.row_optimizer)
        self.weights.zero_()
        # Autograd calls backward only if some input of forward wants a gradient.
        self.anchor = torch.zeros(0, device=device, requires_grad=True)
        self.number = number_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.number = number_of(self)  # a copy updates its own rows

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pooled vectors [B, F * D] float32.

        indices [L] int32 or int64, rows within each table shard, feature-major; offsets [F * B + 1];
        per_sample_weights [L] float32 or None. Raises IndexError naming table and row if a row is out
        of range; nothing has changed then. Raises NonFiniteError if nobody has taken the ``fault`` of the
        backward before.
        """
        if self.fault is not None:
            raise NonFiniteError(self.fault)
        indices, offsets = indices.contiguous(), offsets.long()
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.contiguous()
        if torch.is_grad_enabled():
            return lookup_and_update(self.anchor, indices, offsets, per_sample_weights, self.number)
        features = self.features
        of_features = features.starts, features.sizes, list(features.tables), features.pooling
        return lookup(self.weights, indices, offsets, per_sample_weights, *of_features, self.kernel)

    def receive(self, gradients: RowGradients) -> None:
        """Take one summed gradient for each distinct row; update now, or hold; a ``fault`` if not finite."""
        if self.replicas is not None:
            gradients = mean_over_replicas(gradients, self.row_optimizer.num_rows, self.replicas)
        if not gradients.finite:
            self.fault = f"table {self._table_of_first_bad(gradients)}: non-finite gradient"
        elif self.hold_gradients:
            self.held = replace(gradients, summed=gradients.sums)  # whatever becomes of the batch's memory
        else:
            self._update(gradients)

    def take_fault(self) -> str | None:
        """The fault of the last backward, which the caller answers for from now on."""
        fault, self.fault = self.fault, None
        return fault

    def apply_held(self) -> None:
        """Apply the gradients that backward held, if any."""
        if self.held is not None:
            gradients, self.held = self.held, None
            self._update(gradients)

    def grow(self, step: int) -> bool:
        """Give optimizer state the size that it has after ``step`` steps; whether that is another one."""
        changed = self.row_optimizer.grow(step)
        if changed:
            self.lookup.prepare(self.weights, self.row_optimizer)
        return changed

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """For each shard, its rows [num_rows, D] as a view of live memory."""
        return list(self.weights.split([shard.num_rows for shard in self.row_optimizer.shards]))

    def _update(self, gradients: RowGradients) -> None:
        if self.observer is not None:
            self.observer(gradients.rows)
        if self.clip.is_on:
            self.lookup.clip(self.clip, self.stored, gradients)
        self.lookup.update(self.row_optimizer, self.stored, gradients, self.learning_rate)

    def _table_of_first_bad(self, gradients: RowGradients) -> str:
        rows, bad = gradients.rows, ~torch.isfinite(gradients.sums.square().sum(1))
        row = int(rows[bad][0]) if bad.any() else int(rows[0])
        index = max(i for i, start in enumerate(self.row_optimizer.row_starts) if start <= row)
        return self.row_optimizer.shards[index].table.name
