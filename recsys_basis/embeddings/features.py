"""The features of one group of table shards, and the bags of ids that a batch brings for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from recsys_basis.tables import TableShard

Pooling = Literal["sum", "mean"]


@dataclass(frozen=True)
class Features:
    """F features; where the rows of each begin among the group's rows.

    tables  name of each feature's table
    starts  [F] int64, first group row of its shard
    sizes   [F] int64, rows of its shard
    """

    tables: tuple[str, ...]
    starts: torch.Tensor
    sizes: torch.Tensor
    pooling: Pooling

    @classmethod
    def of(
        cls,
        shards: Sequence[TableShard],
        row_starts: Sequence[int],
        shard_of_feature: Sequence[int],
        pooling: Pooling,
        device: torch.device | str,
    ) -> Features:
        """``shard_of_feature``: the index of each feature's table in ``shards``."""
        return cls(
            tuple(shards[index].table.name for index in shard_of_feature),
            torch.tensor([row_starts[index] for index in shard_of_feature], device=device),
            torch.tensor([shards[index].num_rows for index in shard_of_feature], device=device),
            pooling,
        )

    def out_of_range(self, feature: int, row: int) -> IndexError:
        """The error for ``row`` of ``feature``, which its shard does not have."""
        return IndexError(
            f"table {self.tables[feature]}: row {row} is outside this shard's "
            f"rows 0..{int(self.sizes[feature]) - 1}"
        )


@dataclass(frozen=True)
class Bags:
    """The ids of one batch: F * B bags, feature-major.

    indices             [L] int32 or int64, rows within each feature's table shard
    offsets             [F * B + 1] int64
    per_sample_weights  [L] float32, or None
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None


class InKernels(Protocol):
    """Sums that C++ kernels keep, of which those of one item are still where the batch left them."""

    def tensor(self) -> torch.Tensor:
        """All in one piece [U, D] float32, which is read from now on and may be changed."""


@dataclass(frozen=True)
class RowGradients:
    """What a batch's backward leaves for its U distinct rows.

    rows    [U] int64, ascending group rows
    summed  the gradient of each, duplicates summed: [U, D] float32, or in the kernels' keeping
    finite  whether the sum of all squares of ``sums`` is: they enter every second moment
    counts  [U] int64, how many ids of the batch each row was; None where nobody asks
    """

    rows: torch.Tensor
    summed: torch.Tensor | InKernels
    finite: bool
    counts: torch.Tensor | None

    @property
    def sums(self) -> torch.Tensor:
        """[U, D] float32; the update reads it, and what was changed in it."""
        return self.summed if isinstance(self.summed, torch.Tensor) else self.summed.tensor()
