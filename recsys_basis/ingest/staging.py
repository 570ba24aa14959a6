"""Pass 1: the lines of all raw files, in order, to one temporary Parquet file of typed columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from recsys_basis.ingest.columns import STAGED_SCHEMA
from recsys_basis.ingest.errors import BadLine, DataError
from recsys_basis.ingest.lines import BAD_LINE_KINDS, ParsedBlock, looks_unlabelled, parse_block
from recsys_basis.ingest.manifest import BadLines, Source
from recsys_basis.ingest.raw_files import RawFile, size_of
from recsys_basis.ingest.spec import DatasetConfig

STAGED_GROUP_ROWS = 1 << 18
"""Rows of a row group of the staged file, about 56 MB in memory: few groups even for 4 billion rows."""


@dataclass(frozen=True)
class Staged:
    """What pass 1 wrote: a Parquet file of STAGED_SCHEMA, and what it was read from."""

    path: Path
    num_rows: int
    sources: tuple[Source, ...]
    bad_lines: BadLines


def stage(config: DatasetConfig, path: Path) -> Staged:
    """Write the good lines of ``config.raw_paths`` to the Parquet file ``path``.

    Raises DataError naming the raw file that cannot be read or has no labels, and BadLine for the
    first bad line in order that ``config.on_bad_line`` does not allow for.
    """
    raw_paths = [Path(raw_path) for raw_path in config.raw_paths]
    total_bytes = sum(size_of(raw_path) for raw_path in raw_paths)
    num_rows = 0
    with (
        tqdm(total=total_bytes, desc="1/3 read lines", unit="B", unit_scale=True) as progress,
        pq.ParquetWriter(path, STAGED_SCHEMA, compression="lz4", use_dictionary=False) as writer,
    ):
        reader = _LineReader(config.on_bad_line, progress.update)
        for table in regroup(reader.batches(raw_paths), repeat(STAGED_GROUP_ROWS)):
            writer.write_table(table, row_group_size=STAGED_GROUP_ROWS)
            num_rows += table.num_rows
    return Staged(path, num_rows, tuple(reader.sources), reader.bad_lines())


def regroup(batches: Iterable[pa.RecordBatch], sizes: Iterable[int]) -> Iterator[pa.Table]:
    """The rows of ``batches`` in order, in one table for each of ``sizes`` while rows last."""
    source = iter(batches)
    held: list[pa.RecordBatch] = []
    num_held = 0
    for size in sizes:
        while num_held < size and (batch := next(source, None)) is not None:
            held.append(batch)
            num_held += batch.num_rows
        if num_held == 0:
            return
        table = pa.Table.from_batches(held)
        yield table.slice(0, size)
        held = table.slice(size).to_batches()
        num_held = max(num_held - size, 0)


class _LineReader:
    """Good lines of many files as record batches, and the account of what was read."""

    def __init__(self, on_bad_line: str, on_read: Callable[[int], object]) -> None:
        self.sources: list[Source] = []
        self._on_bad_line, self._on_read = on_bad_line, on_read
        self._skipped: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._num_padded = 0

    def batches(self, paths: Iterable[Path]) -> Iterator[pa.RecordBatch]:
        for path in paths:
            yield from self._read(path)

    def bad_lines(self) -> BadLines:
        counts = {kind: self._skipped[kind] for kind in BAD_LINE_KINDS}
        return BadLines(**counts, first=self._first, padded=self._num_padded)

    def _read(self, path: Path) -> Iterator[pa.RecordBatch]:
        file = RawFile(path, self._on_read)
        num_lines = 0
        for block in file.blocks():
            if num_lines == 0 and looks_unlabelled(block):
                raise DataError(
                    f"{path} looks unlabelled: its lines have 39 columns that fit I1..I13, C1..C26 with no "
                    "label before them; training needs the labelled file"
                )
            parsed = parse_block(block, pad=self._on_bad_line == "pad")
            self._account(path, num_lines, parsed)
            num_lines += parsed.num_lines
            yield parsed.rows
        self.sources.append(
            Source(
                path=str(path),
                num_bytes=file.num_bytes,
                modified_ns=file.modified_ns,
                sha256=file.sha256,
                num_lines=num_lines,
            )
        )

    def _account(self, path: Path, lines_before: int, parsed: ParsedBlock) -> None:
        self._num_padded += parsed.num_padded
        for problem in sorted(parsed.problems, key=lambda problem: problem.index):
            error = BadLine(
                path, lines_before + problem.index + 1, problem.column, problem.kind, problem.reason
            )
            if self._on_bad_line != "skip":
                raise error
            self._skipped[problem.kind] += problem.count
            self._first.setdefault(problem.kind, str(error))
