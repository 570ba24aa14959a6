"""How the rows of one table shard share its buckets. One pass over all rows, done once a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recsys_basis.row_optimizers.basis import Basis
from recsys_basis.row_optimizers.basis.buckets import RowBuckets

ROWS_AT_ONCE = 1 << 20
SAMPLED_BUCKETS = 20
"""Buckets of a shard, evenly spaced, all of whose rows are looked at: 2,000 rows at 100 a bucket."""
NUM_WORST = 3
HOTTEST_IDS = 10


@dataclass(frozen=True)
class ShardBuckets:
    """Numbers of buckets are those of the whole table, numbers of rows those of the group.

    loads    [K_local] int64, ids that each bucket row of this shard serves
    first    number of its first bucket row in the table
    rows     [n] int64, rows of the sampled buckets; places: their buckets; of_row [n], the bucket of each
    ids      [n] int64, their ids
    hottest  (id, bucket) of those of the table's commonest ids that lie here
    worst    (bucket, its ids), the fullest
    """

    loads: torch.Tensor
    first: int
    rows: torch.Tensor
    places: RowBuckets
    of_row: torch.Tensor
    ids: torch.Tensor
    hottest: list[tuple[int, int]]
    worst: list[tuple[int, list[int]]]

    @classmethod
    def of(cls, optimizer: Basis, index: int) -> ShardBuckets:
        """Of the shard ``index`` of ``optimizer``."""
        shard, buckets = optimizer.shards[index], optimizer.buckets
        local, first, _ = optimizer.buckets_of_shard(shard, "second_moment")
        start = sum(optimizer.buckets_of_shard(each, "second_moment")[0] for each in optimizer.shards[:index])
        sampled = torch.linspace(0, local - 1, min(local, SAMPLED_BUCKETS)).long().to(optimizer.device)
        loads = torch.zeros(local, dtype=torch.int64, device=optimizer.device)
        rows_found, hottest = [], []
        row_start = optimizer.row_starts[index]
        for begin in range(0, shard.num_rows, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, shard.num_rows)
            rows = torch.arange(row_start + begin, row_start + end, device=optimizer.device)
            ids = shard.table.ids_of(rows - row_start + shard.row_offset)
            rows, ids = rows[ids < shard.table.num_ids], ids[ids < shard.table.num_ids]
            where = buckets.of_rows(rows)
            own = where.first - start
            loads += torch.bincount(own, minlength=local)
            if where.second is not None:
                twice = where.second != where.first
                loads += torch.bincount(where.second[twice] - start, minlength=local)
            rows_found.append(rows[torch.isin(own, sampled)])
            hot = ids < HOTTEST_IDS
            hottest += list(zip(ids[hot].tolist(), (first + own[hot]).tolist(), strict=True))
        rows = torch.cat(rows_found)
        places = buckets.of_rows(rows)

        def ids_of(rows: torch.Tensor) -> torch.Tensor:
            return shard.table.ids_of(rows - row_start + shard.row_offset)

        def ids_of_bucket(bucket: int) -> list[int]:
            ids = ids_of(buckets.rows_of_bucket(start + bucket)).sort().values
            return ids[ids < shard.table.num_ids].tolist()

        fullest: Sequence[int] = loads.topk(min(local, NUM_WORST)).indices.tolist()
        return cls(
            loads=loads,
            first=first,
            rows=rows,
            places=places,
            of_row=places.first - start + first,
            ids=ids_of(rows),
            hottest=hottest,
            worst=[(first + bucket, ids_of_bucket(bucket)) for bucket in fullest],
        )
