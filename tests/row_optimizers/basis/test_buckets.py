"""The map from rows to buckets: known hash values, even loads, private heads, partitions that own theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.row_optimizers.basis import BasisConfig
from recsys_basis.row_optimizers.basis.buckets import BucketMap, PartitionSizes, mix64, permute
from recsys_basis.tables import Table, TableShard

HASHES = ("balanced", "murmur3", "double", "modulo")
CPU = torch.device("cpu")


def config_of(**options: Any) -> BasisConfig:
    config = row_optimizer_defaults("basis", **options)
    assert isinstance(config, BasisConfig)
    return config


def map_of(shards: list[TableShard], **options: Any) -> BucketMap:
    return BucketMap(config_of(**options), shards, CPU)


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def test_mix64_is_murmur3s_finaliser() -> None:
    """Vectors of fmix64 that independent implementations publish."""
    known = {
        0: 0,
        1: 0xB456BCFC34C2CB2C,
        0xCBF29CE484222325: 0xEFD01F60BA992926,
        0x1234567890ABCDEF: 0x0CAE996FEE6BD396,
        0xDEADBEEFCAFEBABE: 0x7082995008F0C48C,
        0xFFFFFFFFFFFFFFFF: 0x64B5720B4B825F21,
    }
    mixed = mix64(torch.tensor([signed(value) for value in known]))
    assert mixed.tolist() == [signed(value) for value in known.values()]


def test_mix64_makes_murmur3_x64_128_of_nothing() -> None:
    """MurmurHash3_x64_128 of an empty key, seed 1, is two finalisers and four sums: a published vector."""
    low, high = mix64(torch.tensor([2, 3])).tolist()
    low = low + high
    high = high + low
    assert f"{low % 2**64:016x}{high % 2**64:016x}" == "4610abe56eff5cb551622daa78f83583"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    size=st.one_of(st.integers(1, 40), st.integers(41, 5000)),
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4),
)
def test_permute_is_a_bijection(size: int, keys: list[int]) -> None:
    index = torch.arange(size)
    moved = permute(index, torch.full_like(index, size), torch.tensor(keys)[:, None].expand(4, size))
    assert moved.sort().values.tolist() == index.tolist()


@settings(deadline=None, max_examples=20, derandomize=True)
@given(size=st.integers(2**30, 2**45), seed=st.integers(0, 2**62))
def test_permute_of_large_domains_stays_in_range_and_collides_nowhere(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(size, (2000,), generator=generator).unique()
    keys = torch.randint(2**62, (4, 1), generator=generator).expand(4, len(index))
    moved = permute(index, torch.full_like(index, size), keys)
    assert moved.min() >= 0 and moved.max() < size
    assert len(moved.unique()) == len(index)


@pytest.mark.parametrize("hash_name", ["balanced", "murmur3", "double"])
def test_neighbours_share_a_bucket_as_often_as_chance_has_it(hash_name: str) -> None:
    """20,000 places in 20 buckets, and pairs at several distances: one in 20 shares, give or take 3 sigma."""
    buckets = map_of(
        [TableShard.whole(Table("site", 20_000, 1, 1))], hash=hash_name, rows_per_bucket=1000.0
    ).of_rows(torch.arange(20_000))
    maps = [buckets.first] if buckets.second is None else [buckets.first, buckets.second]
    for bucket in maps:
        loads = bucket.bincount(minlength=20)
        assert ((loads - 1000).abs() < 130).all()
        for distance in (1, 2, 20, 141, 1000):
            share = (bucket[distance:] == bucket[:-distance]).double().mean().item()
            assert abs(share - 1 / 20) < 0.005
    if len(maps) == 2:
        assert abs((maps[0] == maps[1]).double().mean().item() - 1 / 20) < 0.005


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    num_ids=st.integers(1, 3000),
    partitions=st.sampled_from([1, 2, 8]),
    rows_per_bucket=st.sampled_from([1.0, 2.5, 7.0, 100.0]),
    head_rows=st.integers(0, 60),
)
def test_balanced_loads_differ_by_at_most_one_and_heads_are_alone(
    num_ids: int, partitions: int, rows_per_bucket: float, head_rows: int
) -> None:
    table = Table("site", num_ids, 1, partitions)
    options = {"rows_per_bucket": rows_per_bucket, "head_rows": head_rows}
    buckets = map_of([TableShard.whole(table)], **options)
    where = buckets.of_rows(torch.arange(table.num_rows))
    sizes = buckets.sizes[0]
    loads = where.first.bincount(minlength=buckets.num_buckets).view(partitions, sizes.num_buckets)
    assert (loads[:, : sizes.num_private] == 1).all()
    shared = loads[:, sizes.num_private :]
    if shared.numel() > 0:
        assert shared.max() - shared.min() <= 1
    assert where.private.view(partitions, -1).sum(1).tolist() == [sizes.num_private] * partitions


@pytest.mark.parametrize("hash_name", HASHES)
def test_the_most_frequent_ids_are_private(hash_name: str) -> None:
    """Ids 0..11 of 400, which lie in all 4 partitions; nobody shares their buckets."""
    table = Table("site", 400, 1, 4)
    buckets = map_of([TableShard.whole(table)], hash=hash_name, rows_per_bucket=10.0, head_rows=12)
    where = buckets.of_rows(table.rows_of(torch.arange(400)))
    assert where.private.tolist() == [True] * 12 + [False] * 388
    own = where.first[:12]
    assert len(own.unique()) == 12
    shared = where.first[12:] if where.second is None else torch.cat([where.first[12:], where.second[12:]])
    assert not torch.isin(own, shared).any()
    if where.second is not None:
        assert torch.equal(where.second[:12], own)
    assert sorted(where.private_row[:12].tolist()) == list(range(12))


@pytest.mark.parametrize("hash_name", HASHES)
def test_a_partition_owns_its_buckets_on_whichever_rank_it_lies(hash_name: str) -> None:
    table, other = Table("site", 1000, 1, 4), Table("user", 77, 1, 1)
    options: dict[str, Any] = {"hash": hash_name, "rows_per_bucket": 10.0, "head_rows": 8}
    whole = map_of([TableShard.whole(other), TableShard.whole(table)], **options)
    start = other.num_rows
    rows = torch.arange(table.num_rows)
    where = whole.of_rows(rows + start)
    first_of_table = whole.num_buckets - 4 * 25
    assert torch.equal((where.first - first_of_table) // 25, rows // 250)
    second_half = map_of([TableShard(table, 500, 500)], **options)
    local = second_half.of_rows(torch.arange(500))
    assert torch.equal(local.first, where.first[500:] - first_of_table - 50)
    if local.second is not None and where.second is not None:
        assert torch.equal(local.second, where.second[500:] - first_of_table - 50)


def test_partitions_tables_and_seeds_hash_differently() -> None:
    def first(name: str, hash_seed: int, partition: int) -> list[int]:
        table = Table(name, 1000, 1, 2)
        shard = TableShard(table, 500 * partition, 500)
        buckets = map_of([shard], rows_per_bucket=10.0, hash_seed=hash_seed)
        return buckets.of_rows(torch.arange(500)).first.tolist()

    maps = [first("site", 0, 0), first("site", 0, 1), first("site", 1, 0), first("user", 0, 0)]
    assert first("site", 0, 0) == maps[0]
    assert len({tuple(bucket) for bucket in maps}) == 4


def test_modulo_is_modulo() -> None:
    table = Table("site", 30, 1, 1)
    buckets = map_of([TableShard.whole(table)], hash="modulo", rows_per_bucket=5.0, head_rows=2)
    assert buckets.of_rows(torch.arange(30)).first.tolist() == [0, 1] + [2 + x % 4 for x in range(28)]


def test_signs_are_half_and_half_and_private_rows_have_none() -> None:
    options = {"direction": "momentum", "scalar": "none", "signed": True, "head_rows": 10}
    buckets = map_of([TableShard.whole(Table("site", 10_000, 1, 1))], rows_per_bucket=100.0, **options)
    sign = buckets.of_rows(torch.arange(10_000)).sign
    assert sign is not None
    assert set(sign.tolist()) == {-1.0, 1.0}
    assert abs(sign.mean().item()) < 0.03
    assert (sign[:10] == 1).all()


@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize(
    "sizes",
    [{"rows_per_bucket": 7.0, "head_rows": 3}, {"rows_per_bucket": 1.0, "head_bucket_share": 1.0}],
    ids=["some private", "all private"],
)
def test_rows_of_bucket_lists_exactly_its_rows(hash_name: str, sizes: dict[str, Any]) -> None:
    tables = [Table("site", 90, 1, 2), Table("user", 33, 1, 1)]
    buckets = map_of([TableShard.whole(table) for table in tables], hash=hash_name, **sizes)
    rows = torch.arange(sum(table.num_rows for table in tables))
    where = buckets.of_rows(rows)
    seen = 0
    for bucket in range(buckets.num_buckets):
        found = buckets.rows_of_bucket(bucket).tolist()
        second = where.first if where.second is None else where.second
        assert found == [r for r in rows.tolist() if bucket in (int(where.first[r]), int(second[r]))]
        seen += len(found)
    assert seen >= len(rows)


@pytest.mark.parametrize(
    ("num_ids", "partitions", "options", "expected"),
    [
        (1000, 4, {"rows_per_bucket": 100.0}, (250, 2, 0)),
        (1000, 4, {"rows_per_bucket": 300.0}, (250, 1, 0)),
        (3, 1, {"rows_per_bucket": 100.0}, (3, 1, 0)),
        (1000, 4, {"rows_per_bucket": 10.0, "head_rows": 9}, (250, 25, 3)),
        (1000, 4, {"rows_per_bucket": 10.0, "head_rows": 1000}, (250, 25, 24)),
        (1000, 4, {"rows_per_bucket": 10.0, "head_bucket_share": 0.8}, (250, 25, 20)),
        (1000, 4, {"rows_per_bucket": 1.0, "head_bucket_share": 1.0}, (250, 250, 250)),
        (1001, 4, {"rows_per_bucket": 2.5}, (251, 100, 0)),
        (1000, 4, {"rows_per_bucket": None, "bucket_rows": 43}, (250, 10, 0)),
        (1000, 4, {"rows_per_bucket": None, "bucket_rows": 3}, (250, 1, 0)),
        (1000, 4, {"rows_per_bucket": None, "bucket_rows": 5000}, (250, 250, 0)),
        (1000, 4, {"rows_per_bucket": None, "bucket_rows": 40, "head_rows": 9}, (250, 10, 3)),
    ],
)
def test_partition_sizes(num_ids: int, partitions: int, options: Any, expected: tuple[int, int, int]) -> None:
    sizes = PartitionSizes.of(Table("site", num_ids, 1, partitions), config_of(**options))
    assert (sizes.num_places, sizes.num_buckets, sizes.num_private) == expected
