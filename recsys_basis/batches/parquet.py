"""Rows of prepared Parquet files, one row group at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_basis.errors import UserError
from recsys_basis.ingest.columns import DENSE_COLUMNS, LABEL_COLUMN, SPARSE_COLUMNS


class ParquetError(UserError):
    """A Parquet file is missing, damaged, or not what ``prepare`` writes."""


@dataclass(frozen=True)
class Columns:
    """Rows in the layout that batches are cut from.

    dense [n, 13] float32; sparse [26, n] int32; label [n] float32.
    """

    dense: np.ndarray
    sparse: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: np.ndarray | slice) -> Columns:
        return Columns(self.dense[rows], self.sparse[:, rows], self.label[rows])

    @classmethod
    def join(cls, parts: Sequence[Columns]) -> Columns:
        return cls(
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.sparse for part in parts], axis=1),
            np.concatenate([part.label for part in parts]),
        )


@dataclass(frozen=True)
class RowGroup:
    """Rows [start, stop) of one row group of one file."""

    path: Path
    index: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def read(self) -> Columns:
        """Decode the rows. Raises ParquetError naming the file."""
        names = [LABEL_COLUMN, *DENSE_COLUMNS, *SPARSE_COLUMNS]
        try:
            table = pq.ParquetFile(self.path).read_row_group(self.index, columns=names)
        except (OSError, pa.ArrowException) as error:
            raise ParquetError(
                f"{self.path}: row group {self.index} cannot be read any more ({error}): prepare the data "
                "anew, then go on with resume=auto"
            ) from error
        if table.num_rows < self.stop:
            raise ParquetError(
                f"{self.path}: row group {self.index} has {table.num_rows} rows and had {self.stop} or "
                "more: prepare the data anew, and leave it alone while it is in use"
            )
        table = table.slice(self.start, self.num_rows)
        dense = np.empty((table.num_rows, len(DENSE_COLUMNS)), dtype=np.float32)
        for place, name in enumerate(DENSE_COLUMNS):
            dense[:, place] = table.column(name).to_numpy()
        sparse = np.empty((len(SPARSE_COLUMNS), table.num_rows), dtype=np.int32)
        for place, name in enumerate(SPARSE_COLUMNS):
            sparse[place] = table.column(name).to_numpy()
        return Columns(dense, sparse, table.column(LABEL_COLUMN).to_numpy().astype(np.float32))


def list_row_groups(paths: Sequence[Path], start: int = 0, stop: int | None = None) -> list[RowGroup]:
    """Row groups of the files ``paths``, in order, cut to the rows [start, stop) of them all.

    Reads footers only. Raises ParquetError where a file has no whole footer or lacks a column.
    """
    groups, position = [], 0
    for path in paths:
        for index, num_rows in enumerate(_rows_of_groups(path)):
            first = max(start - position, 0)
            last = num_rows if stop is None else min(stop - position, num_rows)
            if first < last:
                groups.append(RowGroup(path, index, first, last))
            position += num_rows
    return groups


def _rows_of_groups(path: Path) -> list[int]:
    try:
        footer = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise ParquetError(f"{path}: no readable Parquet footer: {error}") from error
    missing = {LABEL_COLUMN, *DENSE_COLUMNS, *SPARSE_COLUMNS} - set(footer.schema.names)
    if missing:
        raise ParquetError(f"{path}: columns missing: {', '.join(sorted(missing))}")
    return [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
