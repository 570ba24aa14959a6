from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_basis.ingest import encoding
from recsys_basis.ingest.columns import DENSE_COLUMNS, PREPARED_SCHEMA, SPARSE_COLUMNS, STAGED_SCHEMA
from recsys_basis.ingest.encoding import scale, write_splits
from recsys_basis.ingest.vocabulary import ColumnVocabulary, Fitted


def test_integers_are_log1p_of_the_shifted_value():
    scaled = scale(pa.array([-2, 0, 1, 2071071, None, 2**63 - 1], pa.int64()), shift=2)
    expected = [0.0, math.log(3), math.log(4), math.log(2071074), 0.0, math.log(2.0**63)]
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, expected, rtol=1e-7)


def test_values_below_the_shift_are_clipped_at_zero():
    assert scale(pa.array([-3, -100, -(2**63)], pa.int64()), shift=2).tolist() == [0.0, 0.0, 0.0]
    assert scale(pa.array([None, None], pa.int64()), shift=0).tolist() == [0.0, 0.0]


@pytest.fixture
def staged(tmp_path):
    """23 rows; row k has label k % 2 and values k. Every column knows the values 0..9 as ids 1..10."""
    numbers = list(range(23))
    columns = [[number % 2 for number in numbers], *[numbers] * 39]
    table = pa.table(
        [pa.array(c, f.type) for c, f in zip(columns, STAGED_SCHEMA, strict=True)], schema=STAGED_SCHEMA
    )
    pq.write_table(table, tmp_path / "staged.parquet", row_group_size=7)
    column = ColumnVocabulary(np.arange(10, dtype=np.uint32), np.ones(10, np.int64), 0, 13)
    fitted = Fitted(dict.fromkeys(SPARSE_COLUMNS, column), dict.fromkeys(DENSE_COLUMNS, 0), 1, 23)
    return tmp_path / "staged.parquet", fitted


def test_splits_row_groups_and_files_have_the_sizes_asked_for(staged, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "GROUPS_PER_FILE", 2)
    path, fitted = staged
    files = write_splits(path, tmp_path, fitted, {"train": 18, "test": 5}, row_group_rows=4)
    assert [file.path for file in files["train"]] == [
        f"train/part-0000{number}.parquet" for number in range(3)
    ]
    assert [file.num_rows for file in files["train"]] == [8, 8, 2]
    assert [file.path for file in files["test"]] == ["test/part-00000.parquet"]
    groups = {"train": [[4, 4], [4, 4], [2]], "test": [[4, 1]]}
    numbers = []
    for split, split_files in files.items():
        for file, sizes in zip(split_files, groups[split], strict=True):
            read = pq.ParquetFile(tmp_path / file.path)
            assert read.schema_arrow == PREPARED_SCHEMA
            metadata = read.metadata
            assert [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)] == sizes
            numbers.append(read.read())
    table = pa.concat_tables(numbers)
    assert table["label"].to_pylist() == [number % 2 for number in range(23)]
    assert table["C26"].to_pylist() == [*range(1, 11), *[0] * 13]
    scaled = table["I13"].to_pylist()
    assert all(first < second for first, second in pairwise(scaled))


def test_an_empty_test_part_writes_no_file(staged, tmp_path):
    path, fitted = staged
    files = write_splits(path, tmp_path, fitted, {"train": 23, "test": 0}, row_group_rows=100)
    assert [file.num_rows for file in files["train"]] == [23]
    assert files["test"] == ()
    assert not (tmp_path / "test").exists()


def test_memory_does_not_grow_with_the_number_of_row_groups(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    num_groups, group_rows = 40, 2000
    numbers = rng.integers(0, 2**31, num_groups * group_rows)
    columns = [numbers % 2, *[numbers] * 39]
    table = pa.table(
        [pa.array(c).cast(f.type) for c, f in zip(columns, STAGED_SCHEMA, strict=True)], schema=STAGED_SCHEMA
    )
    group_bytes = table.nbytes // num_groups
    pq.write_table(table, tmp_path / "staged.parquet", row_group_size=group_rows, use_dictionary=False)
    del table, columns
    column = ColumnVocabulary(np.arange(1, dtype=np.uint32), np.ones(1, np.int64), 0, 0)
    fitted = Fitted(dict.fromkeys(SPARSE_COLUMNS, column), dict.fromkeys(DENSE_COLUMNS, 0), 1, 1)
    held = []
    encode, before = encoding.encode, pa.total_allocated_bytes()

    def watch(rows: pa.Table, fitted: Fitted) -> pa.Table:
        held.append(pa.total_allocated_bytes() - before)
        return encode(rows, fitted)

    monkeypatch.setattr(encoding, "encode", watch)
    write_splits(tmp_path / "staged.parquet", tmp_path, fitted, {"train": 80_000, "test": 0}, group_rows)
    assert len(held) == num_groups
    assert max(held) < 8 * group_bytes
