"""Pass 3: staged rows to what training reads, in Parquet files of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from recsys_basis.ingest.columns import DENSE_COLUMNS, LABEL_COLUMN, PREPARED_SCHEMA, SPARSE_COLUMNS
from recsys_basis.ingest.manifest import DataFile, SplitName
from recsys_basis.ingest.staging import regroup
from recsys_basis.ingest.vocabulary import Fitted

GROUPS_PER_FILE = 64
"""Row groups of one file: 4 million rows where a group has 65,536."""


def write_splits(
    staged: Path, folder: Path, fitted: Fitted, num_rows: dict[SplitName, int], row_group_rows: int
) -> dict[SplitName, tuple[DataFile, ...]]:
    """Encode the staged rows into ``folder``/<split>/part-*.parquet; returns the files of each split.

    num_rows: the splits in time order, and the rows of each; together all rows of ``staged``.
    """
    sizes = {split: _group_sizes(rows, row_group_rows) for split, rows in num_rows.items()}
    files = {}
    with (
        pq.ParquetFile(staged) as rows,
        tqdm(total=sum(num_rows.values()), desc="3/3 encode rows", unit="row", unit_scale=True) as progress,
    ):
        groups = regroup(_batches(rows), chain.from_iterable(sizes.values()))
        for split, split_sizes in sizes.items():
            encoded = _encoded(islice(groups, len(split_sizes)), fitted, progress)
            files[split] = _write_files(encoded, folder, split)
    return files


def encode(table: pa.Table, fitted: Fitted) -> pa.Table:
    """STAGED_SCHEMA rows to PREPARED_SCHEMA."""
    columns = [table[LABEL_COLUMN]]
    columns += [scale(table[name].combine_chunks(), fitted.integer_shifts[name]) for name in DENSE_COLUMNS]
    columns += [fitted.vocabularies[name].ids_of(table[name].combine_chunks()) for name in SPARSE_COLUMNS]
    return pa.table(columns, schema=PREPARED_SCHEMA)


def scale(integers: pa.Array, shift: int) -> np.ndarray:
    """log1p(max(x + shift, 0)) as float32; a missing x gives 0.0, as the smallest value does.

    Values below -shift occur where a later file holds smaller ones than the training part did.
    """
    shifted = pc.cast(integers, pa.float64(), safe=False).fill_null(-shift).to_numpy() + shift
    return np.log1p(np.maximum(shifted, 0.0)).astype(np.float32)


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    # Not iter_batches: it keeps every page it has read until the end of the file.
    for index in range(file.num_row_groups):
        yield from file.read_row_group(index).to_batches()


def _group_sizes(num_rows: int, row_group_rows: int) -> list[int]:
    whole, rest = divmod(num_rows, row_group_rows)
    return [row_group_rows] * whole + [rest] * (rest > 0)


def _encoded(tables: Iterable[pa.Table], fitted: Fitted, progress: tqdm) -> Iterator[pa.Table]:
    for table in tables:
        yield encode(table, fitted)
        progress.update(table.num_rows)


def _write_files(groups: Iterator[pa.Table], folder: Path, split: str) -> tuple[DataFile, ...]:
    files: list[DataFile] = []
    for first in groups:
        path = folder / split / f"part-{len(files):05d}.parquet"
        path.parent.mkdir(exist_ok=True)
        num_rows = 0
        with pq.ParquetWriter(path, PREPARED_SCHEMA, compression="zstd") as writer:
            for group in chain([first], islice(groups, GROUPS_PER_FILE - 1)):
                writer.write_table(group, row_group_size=group.num_rows)
                num_rows += group.num_rows
        files.append(DataFile.describe(path, folder, num_rows))
    return tuple(files)
