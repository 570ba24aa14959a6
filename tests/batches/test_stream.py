"""Every row once, the same global batches on any number of ranks, from any position."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_basis.batches.batch import Batch
from recsys_basis.batches.parquet import ParquetError, RowGroup, list_row_groups
from recsys_basis.batches.stream import BatchStream, Shuffle
from recsys_basis.ingest.columns import DENSE_COLUMNS, PREPARED_SCHEMA, SPARSE_COLUMNS

ROWS = 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of row groups of 16 rows; row i holds i in every column, so a row can be told anywhere."""
    folder = tmp_path_factory.mktemp("rows")
    for name, start, stop in (("part-00000", 0, 70), ("part-00001", 70, ROWS)):
        rows = np.arange(start, stop)
        columns = {"label": rows % 2}
        columns |= {column: rows + place / 100 for place, column in enumerate(DENSE_COLUMNS)}
        columns |= {column: rows * 100 + place for place, column in enumerate(SPARSE_COLUMNS)}
        table = pa.table(
            {
                name: pa.array(values).cast(PREPARED_SCHEMA.field(name).type)
                for name, values in columns.items()
            }
        )
        pq.write_table(table.cast(PREPARED_SCHEMA), folder / f"{name}.parquet", row_group_size=16)
    return folder


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def rows_of(batch: Batch) -> list[int]:
    """Row numbers in ``batch``, after checking that its three parts tell the same rows."""
    rows = batch.dense[:, 0].round().long()
    expected = rows[:, None].numpy() + np.arange(13) / 100
    np.testing.assert_allclose(batch.dense.numpy(), expected, rtol=1e-6)
    assert batch.sparse.keys() == list(SPARSE_COLUMNS)
    ids = batch.sparse.values().view(26, -1).numpy()
    np.testing.assert_array_equal(ids, rows.numpy()[None] * 100 + np.arange(26)[:, None])
    assert batch.sparse.lengths().tolist() == [1] * (26 * len(rows))
    assert (batch.label.long() == rows % 2).all()
    return [int(row) for row in rows]


def global_batches(groups: list[RowGroup], world_size: int, **settings: object) -> list[list[int]]:
    streams = [
        BatchStream(groups, rank=rank, world_size=world_size, **settings) for rank in range(world_size)
    ]
    batches = []
    for shares in zip(*streams, strict=True):
        rows = [row for share in shares for row in rows_of(share)]
        assert {share.global_rows for share in shares} == {len(rows)}
        assert max(share.num_rows for share in shares) - min(share.num_rows for share in shares) <= 1
        batches.append(rows)
    return batches


def test_file_order_without_shuffle_and_the_last_partial_batch(folder: Path) -> None:
    batches = global_batches(list_row_groups(files(folder)), 1, batch_size=20)
    assert [len(batch) for batch in batches] == [20, 20, 20, 20, 20, 1]
    assert flat(batches) == list(range(ROWS))


@settings(max_examples=40, deadline=None)
@given(
    batch_size=st.integers(1, 120),
    window=st.integers(1, 9),
    seed=st.integers(0, 5),
    world_size=st.integers(1, 4),
    start=st.integers(0, 120),
)
def test_any_world_size_and_position_see_the_same_batches(
    folder: Path, batch_size: int, window: int, seed: int, world_size: int, start: int
) -> None:
    groups = list_row_groups(files(folder))
    shuffle = Shuffle(seed, 0, window)
    alone = global_batches(groups, 1, batch_size=batch_size, shuffle=shuffle)
    assert sorted(flat(alone)) == list(range(ROWS))
    assert len(alone) == BatchStream(groups, batch_size).num_batches
    assert global_batches(groups, world_size, batch_size=batch_size, shuffle=shuffle) == alone
    rest = global_batches(groups, 1, batch_size=batch_size, shuffle=shuffle, start_batch=start)
    assert rest == alone[start:]


def test_seed_and_epoch_change_the_order(folder: Path) -> None:
    groups = list_row_groups(files(folder))
    orders = [
        flat(global_batches(groups, 1, batch_size=50, shuffle=Shuffle(seed, epoch, 2)))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    again = global_batches(groups, 1, batch_size=50, shuffle=Shuffle(0, 0, 2))
    assert flat(again) == orders[0]


def test_shuffle_mixes_within_and_across_row_groups(folder: Path) -> None:
    order = flat(global_batches(list_row_groups(files(folder)), 1, batch_size=10, shuffle=Shuffle(0, 0, 3)))
    steps = np.abs(np.diff(order))
    assert (steps == 1).mean() < 0.2 and np.median(steps) > 8


def test_positions_tell_where_each_rank_s_rows_stand(folder: Path) -> None:
    groups = list_row_groups(files(folder))
    for rank in range(3):
        stream = BatchStream(groups, 20, rank, 3)
        rows = [row for batch in stream for row in rows_of(batch)]
        assert stream.positions(rank).tolist() == rows


@pytest.mark.parametrize(
    "start, stop", [(0, ROWS), (0, 1), (15, 17), (64, 80), (69, 71), (100, ROWS), (30, 30)]
)
def test_row_ranges_cut_row_groups_and_files(folder: Path, start: int, stop: int) -> None:
    batches = global_batches(list_row_groups(files(folder), start, stop), 1, batch_size=7)
    assert flat(batches) == list(range(start, stop))


def test_cut_file_names_it(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "part-00000.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-50])
    with pytest.raises(ParquetError, match=r"a\.parquet.*footer"):
        list_row_groups(files(tmp_path))


def test_file_that_vanishes_or_rots_while_reading_names_it(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes((folder / "part-00000.parquet").read_bytes())
    groups = list_row_groups(files(tmp_path))
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(ParquetError, match=r"a\.parquet"):
        list(BatchStream(groups, 10))
    path.unlink()
    with pytest.raises(ParquetError, match=r"a\.parquet"):
        list(BatchStream(groups, 10))


def test_missing_column_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1], "I1": [0.0]}), tmp_path / "a.parquet")
    with pytest.raises(ParquetError, match=r"a\.parquet.*C1"):
        list_row_groups(files(tmp_path))
