"""One embedding table: its ids, its rows, and how ids are striped over virtual partitions.

Ids come ordered by descending frequency. Contiguous row-wise shards of such ids would give
rank 0 all the traffic, so a table is cut into P virtual partitions, P a power of two, and id r
is stored at place r div P of partition reverse(r mod P):

    row(r) = reverse(r mod P) * (N / P) + r div P          N = ceil(num_ids / P) * P

where reverse mirrors the log2 P bits. Neighbouring ids then lie in partitions far apart, so on any
number of ranks the commonest ones are dealt out in turn. Without the mirror, ids 0..P/W - 1 all go
to rank 0: with P = 64, zipf 1.05 and 200,000 ids the busiest of 4 ranks has 1.90 times the mean
traffic, with it 1.24. The rest is the one commonest id, 10 % of all traffic, which nothing can split.
Every rank's shard owns whole partitions; all state saved for a table (weights, bucket rows,
row scalars) is ordered by that row number, so it does not depend on the number of ranks.
P is part of the model: another P is another model, and checkpoints record it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from recsys_basis.id_counts import IdCounts

MAX_PARTITIONS = 1 << 16


@dataclass(frozen=True)
class Table:
    """One embedding table of ``num_ids`` ids and width ``embedding_dim`` (D)."""

    name: str
    num_ids: int
    embedding_dim: int
    num_partitions: int
    counts: IdCounts | None = field(default=None, compare=False, repr=False)
    """Of its ids in the training part, for rules that ask (``RowOptimizerConfig.needs_counts``)."""

    def __post_init__(self) -> None:
        for size in ("num_ids", "embedding_dim", "num_partitions"):
            if getattr(self, size) < 1:
                raise ValueError(f"table {self.name}: {size} = {getattr(self, size)}, must be >= 1")
        if self.num_partitions & (self.num_partitions - 1) or self.num_partitions > MAX_PARTITIONS:
            raise ValueError(
                f"table {self.name}: num_partitions = {self.num_partitions}, must be a power of two "
                f"up to {MAX_PARTITIONS}"
            )

    @property
    def rows_per_partition(self) -> int:
        """N / P."""
        return -(-self.num_ids // self.num_partitions)

    @property
    def num_rows(self) -> int:
        """N: the ids, padded so that every partition is full."""
        return self.rows_per_partition * self.num_partitions

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ``ids`` (int64, any shape), same shape. No bounds check."""
        return stripe(ids, self.num_partitions, self.rows_per_partition)

    def ids_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Inverse of ``rows_of``; padding rows get ids >= num_ids."""
        return unstripe(rows, self.num_partitions, self.rows_per_partition)

    def seed(self, *parts: int | str) -> int:
        """A 63-bit seed of this table's name and ``parts``, the same on every machine and rank."""
        text = "/".join(str(part) for part in (self.name, *parts))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stripe(
    ids: torch.Tensor, num_partitions: int | torch.Tensor, rows_per_partition: int | torch.Tensor
) -> torch.Tensor:
    """row(r) of each id: of one table, or with P and N / P of each id's own table."""
    partition = mirror_bits(ids & (num_partitions - 1), num_partitions)  # faster than ids % P, a power of two
    return partition * rows_per_partition + ids // num_partitions


def unstripe(
    rows: torch.Tensor, num_partitions: int | torch.Tensor, rows_per_partition: int | torch.Tensor
) -> torch.Tensor:
    """Inverse of ``stripe``."""
    partition = mirror_bits(rows // rows_per_partition, num_partitions)
    return rows % rows_per_partition * num_partitions + partition


def mirror_bits(values: torch.Tensor, powers: int | torch.Tensor) -> torch.Tensor:
    """``values`` (int64, 0 <= value < power) with the log2(power) bits of each in reverse order.

    powers: a power of two up to ``MAX_PARTITIONS``, or one for each value.
    """
    for mask, shift in ((0x5555, 1), (0x3333, 2), (0x0F0F, 4), (0x00FF, 8)):
        values = (values & mask) << shift | (values >> shift) & mask
    return values * powers >> 16  # 16 bits are mirrored now: keep the upper log2(power)


def count_partitions(num_ids: int, most: int, min_rows: int) -> int:
    """P of a table: the largest power of two <= ``most`` that leaves ``min_rows`` ids a partition."""
    limit = max(1, min(most, num_ids // min_rows))
    return 1 << (limit.bit_length() - 1)


@dataclass(frozen=True)
class TableShard:
    """Contiguous rows [row_offset, row_offset + num_rows) of ``table``: whole partitions on one rank.

    A block of columns is a shard of a narrower table; it begins at ``column_offset`` of the whole one.
    """

    table: Table
    row_offset: int
    num_rows: int
    column_offset: int = 0

    def __post_init__(self) -> None:
        size = self.table.rows_per_partition
        if self.row_offset % size or self.num_rows % size:
            raise ValueError(
                f"table {self.table.name}: rows {self.row_offset}..{self.row_offset + self.num_rows} do not "
                f"fall on the bounds of its {self.table.num_partitions} partitions of {size} rows; shard it "
                f"row-wise over a number of ranks that divides {self.table.num_partitions}, or table-wise"
            )

    @classmethod
    def whole(cls, table: Table) -> TableShard:
        """The one shard that owns every row of ``table``."""
        return cls(table, 0, table.num_rows)

    @property
    def first_partition(self) -> int:
        return self.row_offset // self.table.rows_per_partition

    @property
    def num_partitions(self) -> int:
        return self.num_rows // self.table.rows_per_partition
