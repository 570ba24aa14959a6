"""Table-batched embedding bags that apply a row optimizer inside backward.

One lookup serves all tables of a group. Backward sums the gradients of each distinct row,
so the row optimizer sees [U, D], and no gradient of table size [R, D] ever exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from recsys_basis.errors import UserError
from recsys_basis.row_optimizers import create_row_optimizer
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.segments import Segments
from recsys_basis.tables import TableShard

Pooling = Literal["sum", "mean"]


class NonFiniteError(UserError, FloatingPointError):
    """A value of training is NaN or infinite, or a gradient is too large to square.

    Raised before the module that found it changes anything.
    """


class RowOptimizedEmbeddingBags(nn.Module):
    """All table shards of one group on one rank, and the optimizer state of their rows.

    shards              the group's table shards, all of width D, in storage order
    shard_of_feature    for each of the F features, the index of its table in ``shards``
    row_optimizer       which rule updates the rows, and its settings
    pooling             "sum", or "mean": the sum divided by the number of ids in the bag
                        (also with per-sample weights, as TorchRec's table-wise sharding does)
    hold_gradients      False: rows change inside backward. True: backward leaves (rows, gradients)
                        in ``held`` until ``apply_held``, so that a norm over all gradients can be
                        taken first

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
    ) -> None:
        super().__init__()
        self.row_optimizer = create_row_optimizer(row_optimizer, shards, device)
        self.learning_rate = row_optimizer.learning_rate
        self.pooling = pooling
        self.hold_gradients = hold_gradients
        self.held: tuple[torch.Tensor, torch.Tensor] | None = None
        self.embedding_dim = self.row_optimizer.embedding_dim
        # A plain tensor: as a Parameter it would ask autograd for a gradient of table size.
        self.weights = torch.zeros(self.row_optimizer.num_rows, self.embedding_dim, device=device)
        starts = [self.row_optimizer.row_starts[index] for index in shard_of_feature]
        sizes = [shards[index].num_rows for index in shard_of_feature]
        self.feature_tables = [shards[index].table.name for index in shard_of_feature]
        self.feature_starts = torch.tensor(starts, dtype=torch.int64, device=device)
        self.feature_sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        # Autograd calls backward only if some input of forward wants a gradient.
        self.anchor = torch.zeros(0, device=device, requires_grad=True)

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pooled vectors [B, F * D] float32.

        indices [L] int32 or int64, rows within each table shard, feature-major; offsets [F * B + 1];
        per_sample_weights [L] float32 or None. Raises IndexError naming table and row if a row is out
        of range; nothing has changed then.
        """
        num_features = len(self.feature_tables)
        offsets = offsets.long()
        batch_size = (offsets.numel() - 1) // num_features
        ends = offsets[::batch_size] if batch_size else offsets.expand(num_features + 1)
        feature_of_item = torch.arange(num_features, device=indices.device).repeat_interleave(ends.diff())
        indices = indices.long()
        self._check_range(indices, feature_of_item)
        rows = indices + self.feature_starts[feature_of_item]
        pooled = _LookupAndUpdate.apply(self.anchor, per_sample_weights, self, rows, offsets)
        by_feature = pooled.view(num_features, batch_size, self.embedding_dim)
        return by_feature.transpose(0, 1).reshape(batch_size, num_features * self.embedding_dim)

    def _check_range(self, indices: torch.Tensor, feature_of_item: torch.Tensor) -> None:
        wrong = (indices < 0) | (indices >= self.feature_sizes[feature_of_item])
        if wrong.any():
            item = int(wrong.nonzero()[0])
            feature = int(feature_of_item[item])
            raise IndexError(
                f"table {self.feature_tables[feature]}: row {int(indices[item])} is outside this shard's "
                f"rows 0..{int(self.feature_sizes[feature]) - 1}"
            )

    def receive(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Take one summed gradient [U, D] for each distinct row [U]; update now, or hold."""
        # The squares enter every second moment: their sum is finite only if all of them are.
        if not torch.isfinite(gradients.square().sum()):
            raise NonFiniteError(f"table {self._table_of_first_bad(rows, gradients)}: non-finite gradient")
        if self.hold_gradients:
            self.held = (rows, gradients)
        else:
            self.row_optimizer.update(self.weights, rows, gradients, self.learning_rate)

    def apply_held(self) -> None:
        """Apply the gradients that backward held, if any."""
        if self.held is not None:
            rows, gradients = self.held
            self.held = None
            self.row_optimizer.update(self.weights, rows, gradients, self.learning_rate)

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """For each shard, its rows [num_rows, D] as a view of live memory."""
        return list(self.weights.split([shard.num_rows for shard in self.row_optimizer.shards]))

    def _table_of_first_bad(self, rows: torch.Tensor, gradients: torch.Tensor) -> str:
        bad = ~torch.isfinite(gradients.square().sum(1))
        row = int(rows[bad][0]) if bad.any() else int(rows[0])
        index = max(i for i, start in enumerate(self.row_optimizer.row_starts) if start <= row)
        return self.row_optimizer.shards[index].table.name


class _LookupAndUpdate(torch.autograd.Function):
    """Forward pools rows; backward sums gradients by row and hands them to the module."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        bags: RowOptimizedEmbeddingBags,
        rows: torch.Tensor,
        offsets: torch.Tensor,
    ) -> torch.Tensor:
        """[F * B, D]: bag by bag, feature-major."""
        ctx.bags = bags
        ctx.save_for_backward(rows, offsets, per_sample_weights)
        pooled = F.embedding_bag(
            rows,
            bags.weights,
            offsets,
            mode="sum",
            per_sample_weights=per_sample_weights,
            include_last_offset=True,
        )
        if bags.pooling == "mean":
            pooled /= offsets.diff().clamp(min=1).unsqueeze(1)
        return pooled

    @staticmethod
    def backward(ctx: Any, *pooled_gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bags: RowOptimizedEmbeddingBags = ctx.bags
        rows, offsets, per_sample_weights = ctx.saved_tensors
        gradient = pooled_gradients[0].contiguous()
        sizes = offsets.diff()
        if bags.pooling == "mean":
            gradient = gradient / sizes.clamp(min=1).unsqueeze(1)
        bag_of_item = torch.arange(len(sizes), device=rows.device).repeat_interleave(sizes)
        weight_gradient = None
        if ctx.needs_input_grad[1]:  # with the weights that forward saw, so before the update
            weight_gradient = (gradient[bag_of_item] * bags.weights[rows]).sum(1)
        segments = Segments.of(rows)
        bags.receive(segments.keys, segments.sum(gradient, bag_of_item, per_sample_weights))
        return None, weight_gradient, None, None, None
