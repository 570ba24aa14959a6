"""One pass over a shard finds what looking at each row finds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from recsys_basis.diagnostics import buckets as module
from recsys_basis.diagnostics.buckets import ShardBuckets
from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.basis import Basis
from recsys_basis.tables import Table, TableShard

FIRST = Table("first", num_ids=30, embedding_dim=4, num_partitions=2)
SECOND = Table("second", num_ids=813, embedding_dim=4, num_partitions=4)  # three rows of padding


@pytest.mark.parametrize("hash_name", ["balanced", "murmur3", "double", "modulo"])
def test_loads_rows_and_ids(hash_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 100)
    half = TableShard(SECOND, 2 * SECOND.rows_per_partition, 2 * SECOND.rows_per_partition)
    config = row_optimizer_defaults("basis", rows_per_bucket=7.0, hash=hash_name)
    optimizer = create_row_optimizer(config, [TableShard.whole(FIRST), half])
    assert isinstance(optimizer, Basis)
    found = ShardBuckets.of(optimizer, 1)

    ids_of: dict[int, list[int]] = {}  # bucket of the whole table -> its ids here
    start = optimizer.buckets_of_shard(optimizer.shards[0], "second_moment")[0]
    local, first, _ = optimizer.buckets_of_shard(half, "second_moment")
    assert first == local > 0 and found.first == first
    bucket_of = {}
    for row in range(half.num_rows):
        number = int(SECOND.ids_of(torch.tensor(row + half.row_offset)))
        if number < SECOND.num_ids:
            where = optimizer.buckets.of_rows(torch.tensor([optimizer.row_starts[1] + row]))
            bucket_of[number] = int(where.first) - start + first
            second = bucket_of[number] if where.second is None else int(where.second) - start + first
            for bucket in {bucket_of[number], second}:
                ids_of.setdefault(bucket, []).append(number)
    assert found.loads.tolist() == [len(ids_of.get(first + bucket, [])) for bucket in range(local)]
    fullest = sorted(map(len, ids_of.values()), reverse=True)[:3]
    assert [len(ids) for _, ids in found.worst] == fullest
    assert all(ids == sorted(ids_of[bucket]) for bucket, ids in found.worst)
    assert dict(found.hottest) == {row: bucket for row, bucket in bucket_of.items() if row < 10}

    assert len(set(found.of_row.tolist())) <= module.SAMPLED_BUCKETS < local
    looked_at = Counter(found.of_row.tolist())
    for row, bucket in zip(found.ids.tolist(), found.of_row.tolist(), strict=True):
        assert bucket_of[row] == bucket
    assert all(looked_at[bucket] == Counter(bucket_of.values())[bucket] for bucket in looked_at)
