"""One embedding table: its ids, its rows, and how ids are striped over virtual partitions.

Ids come ordered by descending frequency. Contiguous row-wise shards of such ids would give
rank 0 all the traffic, so a table is cut into P virtual partitions and id r is stored at

    row(r) = (r mod P) * (N / P) + r div P          N = ceil(num_ids / P) * P

Every rank's shard owns whole partitions; all state saved for a table (weights, bucket rows,
row scalars) is ordered by that row number, so it does not depend on the number of ranks.
P is part of the model: another P is another model, and checkpoints record it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Table:
    """One embedding table of ``num_ids`` ids and width ``embedding_dim`` (D)."""

    name: str
    num_ids: int
    embedding_dim: int
    num_partitions: int

    def __post_init__(self) -> None:
        for field in ("num_ids", "embedding_dim", "num_partitions"):
            if getattr(self, field) < 1:
                raise ValueError(f"table {self.name}: {field} = {getattr(self, field)}, must be >= 1")

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
        return ids % self.num_partitions * self.rows_per_partition + ids // self.num_partitions

    def ids_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Inverse of ``rows_of``; padding rows get ids >= num_ids."""
        partition, place = rows // self.rows_per_partition, rows % self.rows_per_partition
        return place * self.num_partitions + partition

    def seed(self, *parts: int | str) -> int:
        """A 63-bit seed of this table's name and ``parts``, the same on every machine and rank."""
        text = "/".join(str(part) for part in (self.name, *parts))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def count_partitions(num_ids: int, most: int, min_rows: int) -> int:
    """P of a table: the largest power of two <= ``most`` that leaves ``min_rows`` ids a partition."""
    limit = max(1, min(most, num_ids // min_rows))
    return 1 << (limit.bit_length() - 1)


@dataclass(frozen=True)
class TableShard:
    """Contiguous rows [row_offset, row_offset + num_rows) of ``table``: whole partitions on one rank."""

    table: Table
    row_offset: int
    num_rows: int

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
