from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_basis.ingest import raw_files, staging
from recsys_basis.ingest.columns import STAGED_SCHEMA
from recsys_basis.ingest.errors import BadLine, DataError
from recsys_basis.ingest.staging import regroup, stage


@given(st.lists(st.integers(0, 7), max_size=12), st.lists(st.integers(1, 9), max_size=12))
def test_regroup_keeps_every_row_in_order(batch_sizes, sizes):
    stop, batches = 0, []
    for size in batch_sizes:
        batches.append(pa.record_batch({"x": pa.array(range(stop, stop + size), pa.int64())}))
        stop += size
    tables = list(regroup(batches, sizes))
    values = [value for table in tables for value in table["x"].to_pylist()]
    assert values == list(range(min(stop, sum(sizes))))
    got = [table.num_rows for table in tables]
    assert got[:-1] == sizes[: len(got)][:-1]
    assert all(size > 0 for size in got)


def write_lines(config, lines: list[bytes], index: int = 0) -> None:
    Path(config.raw_paths[index]).write_bytes(b"".join(lines))


def test_rows_of_all_files_in_order_with_bounded_row_groups(config, raw_line, tmp_path, monkeypatch):
    monkeypatch.setattr(raw_files, "BLOCK_BYTES", 300)
    monkeypatch.setattr(staging, "STAGED_GROUP_ROWS", 4)
    config = config.model_copy(update={"raw_paths": (str(tmp_path / "a"), str(tmp_path / "b.gz"))})
    lines = [raw_line(I1=b"%d" % number) for number in range(10)]
    write_lines(config, lines[:7])
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"".join(lines[7:])))
    staged = stage(config, tmp_path / "staged.parquet")
    file = pq.ParquetFile(staged.path)
    assert file.read()["I1"].to_pylist() == list(range(10))
    assert file.schema_arrow == STAGED_SCHEMA
    assert [file.metadata.row_group(index).num_rows for index in range(3)] == [4, 4, 2]
    assert staged.num_rows == 10
    assert [source.num_lines for source in staged.sources] == [7, 3]
    assert staged.bad_lines.num_skipped == staged.bad_lines.padded == 0


@pytest.mark.parametrize("block_bytes", [1 << 20, 200])
def test_error_stops_at_the_first_bad_line_in_order(config, raw_line, tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(raw_files, "BLOCK_BYTES", block_bytes)
    lines = [raw_line()] * 16 + [raw_line(I3=b"4x"), raw_line(label=b"5"), b"\n"]
    write_lines(config, lines)
    with pytest.raises(BadLine) as caught:
        stage(config, tmp_path / "staged.parquet")
    error = caught.value
    assert str(error) == f"{config.raw_paths[0]} line 17, column I3: '4x' is not an integer"
    assert (error.line, error.column, error.kind) == (17, "I3", "bad_integer")


def test_line_numbers_start_anew_in_each_file(config, raw_line, tmp_path):
    config = config.model_copy(update={"raw_paths": (str(tmp_path / "a"), str(tmp_path / "b"))})
    write_lines(config, [raw_line()] * 9)
    write_lines(config, [raw_line(), b"1\t2\n"], index=1)
    with pytest.raises(BadLine, match=r"/b line 2: 2 columns instead of 40"):
        stage(config, tmp_path / "staged.parquet")


def test_pad_still_stops_at_other_faults(config, raw_line, tmp_path):
    config = config.model_copy(update={"on_bad_line": "pad"})
    write_lines(config, [raw_line(C26=b"").rstrip(b"\t\n") + b"\n", raw_line(C3=b"zz")])
    with pytest.raises(BadLine, match="line 2, column C3: 'zz' is not an id of 1 to 8 hex digits"):
        stage(config, tmp_path / "staged.parquet")


@pytest.mark.parametrize("block_bytes", [1 << 20, 200])
def test_skip_counts_by_kind_and_keeps_the_rest(config, raw_line, tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(raw_files, "BLOCK_BYTES", block_bytes)
    config = config.model_copy(update={"on_bad_line": "skip"})
    bad = [raw_line(I3=b"4x"), raw_line(C4=b"zz"), b"\n", raw_line(I9=b"-"), raw_line(label=b"")]
    lines = [raw_line(I1=b"0"), *bad[:2], raw_line(I1=b"1"), *bad[2:], raw_line(I1=b"2")]
    write_lines(config, lines)
    staged = stage(config, tmp_path / "staged.parquet")
    assert pq.read_table(staged.path)["I1"].to_pylist() == [0, 1, 2]
    report = staged.bad_lines
    assert (report.wrong_column_count, report.bad_label, report.bad_integer, report.bad_id) == (1, 1, 2, 1)
    assert (report.num_skipped, report.padded) == (5, 0)
    path = config.raw_paths[0]
    assert report.first == {
        "bad_integer": f"{path} line 2, column I3: '4x' is not an integer",
        "bad_id": f"{path} line 3, column C4: 'zz' is not an id of 1 to 8 hex digits",
        "wrong_column_count": f"{path} line 5: 1 column instead of 40 "
        "(on_bad_line=pad restores trailing empty columns that were stripped)",
        "bad_label": f"{path} line 7, column label: '' is not 0 or 1",
    }


@pytest.mark.parametrize("policy", ["error", "skip", "pad"])
def test_a_file_without_labels_is_refused_by_every_policy(config, raw_line, tmp_path, policy):
    config = config.model_copy(update={"on_bad_line": policy})
    write_lines(config, [raw_line(I1=b"12", C1=b"68fd1e64").split(b"\t", 1)[1]] * 5)
    with pytest.raises(DataError, match="looks unlabelled: its lines have 39 columns"):
        stage(config, tmp_path / "staged.parquet")


def test_a_missing_file_is_refused_before_any_is_read(config, tmp_path):
    config = config.model_copy(update={"raw_paths": (str(tmp_path / "a"), str(tmp_path / "none"))})
    write_lines(config, [b"not a log\n"])
    with pytest.raises(DataError, match="none cannot be read"):
        stage(config, tmp_path / "staged.parquet")
    assert not (tmp_path / "staged.parquet").exists()
