"""Ids to rows and back, stripes, partitions, shards."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_basis.tables import Table, TableShard, count_partitions, mirror_bits


@settings(deadline=None, max_examples=60, derandomize=True)
@given(num_ids=st.integers(1, 500), partitions=st.sampled_from([1, 2, 4, 8, 16, 256]))
def test_rows_and_ids_are_inverse_and_rows_fill_the_table(num_ids: int, partitions: int) -> None:
    table = Table("site", num_ids, 4, partitions)
    assert table.num_rows % partitions == 0 and 0 <= table.num_rows - num_ids < partitions
    rows = torch.arange(table.num_rows)
    ids = table.ids_of(rows)
    assert ids.sort().values.tolist() == rows.tolist()
    assert torch.equal(table.rows_of(ids), rows)


def test_ids_are_striped_over_partitions() -> None:
    """numpy's own picture: ids in rows of P, read by columns, the columns in mirrored order."""
    table = Table("site", 10, 4, 4)
    assert (table.rows_per_partition, table.num_rows) == (3, 12)
    columns = np.arange(12).reshape(3, 4).T[[0, 2, 1, 3]]
    assert table.ids_of(torch.arange(12)).tolist() == columns.ravel().tolist()
    assert table.rows_of(torch.tensor([[0, 1], [4, 9]])).tolist() == [[0, 6], [1, 8]]


@pytest.mark.parametrize("bits", range(17))
def test_mirrored_bits_are_the_text_read_backwards(bits: int) -> None:
    values = range(0, 2**bits, max(1, 2**bits // 997))
    expected = [int(f"{value:0{bits}b}"[::-1], 2) if bits else 0 for value in values]
    assert mirror_bits(torch.tensor(values), 2**bits).tolist() == expected
    assert mirror_bits(torch.tensor(values), torch.full((len(values),), 2**bits)).tolist() == expected


@pytest.mark.parametrize("partitions", [3, 6, 2**17])
def test_partitions_are_a_power_of_two(partitions: int) -> None:
    with pytest.raises(ValueError, match=f"table site: num_partitions = {partitions}"):
        Table("site", 10, 4, partitions)


@pytest.mark.parametrize("field", ["num_ids", "embedding_dim", "num_partitions"])
def test_sizes_below_one_are_refused(field: str) -> None:
    sizes = {"num_ids": 5, "embedding_dim": 4, "num_partitions": 1} | {field: 0}
    with pytest.raises(ValueError, match=f"table site: {field} = 0"):
        Table("site", **sizes)


def test_seeds_are_of_name_and_parts_and_fit_int64() -> None:
    table = Table("site", 5, 4, 1)
    digest = hashlib.blake2b(b"site/bucket/3", digest_size=8).digest()
    assert table.seed("bucket", 3) == int.from_bytes(digest, "little") // 2
    seeds = {table.seed("bucket", part) for part in range(1000)} | {Table("user", 5, 4, 1).seed("bucket", 3)}
    assert len(seeds) == 1001
    assert all(0 <= seed < 2**63 for seed in seeds)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(num_ids=st.integers(1, 10**6), most=st.integers(1, 1000), min_rows=st.integers(1, 1000))
def test_count_partitions_is_the_largest_power_of_two_allowed(num_ids: int, most: int, min_rows: int) -> None:
    allowed = [2**k for k in range(30) if 2**k <= most and num_ids / 2**k >= min_rows]
    assert count_partitions(num_ids, most, min_rows) == max(allowed, default=1)


def test_shards_know_their_partitions() -> None:
    table = Table("site", 10, 4, 4)
    whole, last = TableShard.whole(table), TableShard(table, 6, 6)
    assert (whole.row_offset, whole.num_rows, whole.first_partition, whole.num_partitions) == (0, 12, 0, 4)
    assert (last.first_partition, last.num_partitions) == (2, 2)


@pytest.mark.parametrize(("offset", "num_rows"), [(1, 3), (3, 4), (2, 2)])
def test_shards_that_cut_a_partition_are_refused(offset: int, num_rows: int) -> None:
    with pytest.raises(ValueError, match=rf"table site: rows {offset}\.\.{offset + num_rows} .* divides 4"):
        TableShard(Table("site", 10, 4, 4), offset, num_rows)
