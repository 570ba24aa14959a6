"""Pass 2: what is learned from the training part, and kept for later files of the same log.

Of each categorical column, its vocabulary: the values seen ``min_count`` times or more get the
ids 1, 2, ... by descending count, ties by ascending value; missing and rare values share id 0.
Of each integer column, its shift: -min where the smallest training value is negative, else 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from recsys_basis.ingest.columns import DENSE_COLUMNS, SPARSE_COLUMNS
from recsys_basis.ingest.errors import DataError
from recsys_basis.ingest.manifest import DataFile, Manifest
from recsys_basis.ingest.spec import DatasetConfig
from recsys_basis.ingest.staged_table import StagedTable

VOCABULARY_FOLDER = "vocabulary"
VOCABULARY_SCHEMA = pa.schema(
    [
        pa.field("value", pa.uint32(), nullable=False),
        pa.field("id", pa.int32(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class ColumnVocabulary:
    """Vocabulary of one column.

    values [num_ids - 1] uint32 and counts [num_ids - 1] int64: entry i is of id i + 1. Counts are
    those of the training part; num_missing and num_rare are the two parts of id 0's count.
    """

    values: np.ndarray
    counts: np.ndarray
    num_missing: int
    num_rare: int

    @property
    def num_ids(self) -> int:
        """Ids, id 0 included."""
        return len(self.values) + 1

    def id_counts(self) -> np.ndarray:
        """[num_ids] int64: how often each id occurs in the training part."""
        return np.concatenate(([self.num_missing + self.num_rare], self.counts))

    def ids_of(self, values: pa.Array) -> np.ndarray:
        """int32 ids of a uint32 array whose nulls are missing values."""
        # get_indexer gives -1 for an unknown value, which becomes id 0.
        ids = self._index.get_indexer(values.fill_null(0).to_numpy()) + 1
        ids[values.is_null().to_numpy(zero_copy_only=False)] = 0
        return ids.astype(np.int32)

    @cached_property
    def _index(self) -> pd.Index:
        return pd.Index(self.values)


@dataclass(frozen=True)
class Fitted:
    """Vocabularies and integer shifts of all columns, and the training rows they were fitted on."""

    vocabularies: Mapping[str, ColumnVocabulary]
    integer_shifts: Mapping[str, int]
    min_count: int
    num_rows: int

    def save(self, folder: Path) -> dict[str, DataFile]:
        """Write ``folder``/vocabulary/<column>.parquet; returns the files by column."""
        (folder / VOCABULARY_FOLDER).mkdir()
        files = {}
        for name, vocabulary in self.vocabularies.items():
            path = folder / VOCABULARY_FOLDER / f"{name}.parquet"
            ids = np.arange(1, vocabulary.num_ids, dtype=np.int32)
            table = pa.table([vocabulary.values, ids, vocabulary.counts], schema=VOCABULARY_SCHEMA)
            pq.write_table(table, path, compression="zstd")
            files[name] = DataFile.describe(path, folder, len(ids))
        return files

    @classmethod
    def load(cls, folder: Path | str) -> Fitted:
        """What the prepared ``folder`` was encoded with.

        Raises DataError naming a file that is missing or damaged.
        """
        manifest = Manifest.load(folder)
        vocabularies = {}
        for name, file in manifest.vocabulary_files.items():
            file.verify(folder)
            table = pq.read_table(Path(folder) / file.path, schema=VOCABULARY_SCHEMA)
            counts = manifest.vocabulary.columns[name]
            vocabularies[name] = ColumnVocabulary(
                values=table["value"].to_numpy(),
                counts=table["count"].to_numpy(),
                num_missing=counts.num_missing,
                num_rare=counts.num_rare,
            )
        record = manifest.vocabulary
        return cls(vocabularies, manifest.integer_shifts, record.min_count, record.num_rows)


def vocabulary_digest(manifest: Manifest, folder: Path | str, column: str, num_ids: int | None = None) -> str:
    """SHA-256 of what the ids below ``num_ids`` of ``column`` mean in the prepared ``folder``; None: all ids.

    Raises DataError naming a file that is missing or damaged.
    """
    file = manifest.vocabulary_files[column]
    file.verify(folder)
    values = pq.read_table(Path(folder) / file.path, columns=["value"])["value"].to_numpy()
    known = values if num_ids is None else values[: num_ids - 1]  # id 0 has no value
    return hashlib.sha256(known.astype("<u4").tobytes()).hexdigest()


def fit(staged: StagedTable, num_rows: int, min_count: int) -> Fitted:
    """Fit on the first ``num_rows`` staged rows, the training part."""
    present = staged.query(", ".join(f"count({name}) AS {name}" for name in SPARSE_COLUMNS), 0, num_rows)
    vocabularies = {}
    for name in tqdm(SPARSE_COLUMNS, desc="2/3 fit columns", unit="column"):
        num_present = present[name][0].as_py()
        kept = staged.query(
            f"{name} AS value, count(*) AS count",
            0,
            num_rows,
            f"AND {name} IS NOT NULL GROUP BY value HAVING count >= {min_count} ORDER BY count DESC, value",
        )
        vocabularies[name] = ColumnVocabulary(
            values=kept["value"].to_numpy(),
            counts=kept["count"].to_numpy(),
            num_missing=num_rows - num_present,
            num_rare=num_present - pc.sum(kept["count"], min_count=0).as_py(),
        )
    smallest = staged.query(", ".join(f"min({name}) AS {name}" for name in DENSE_COLUMNS), 0, num_rows)
    shifts = {name: max(-(smallest[name][0].as_py() or 0), 0) for name in DENSE_COLUMNS}
    return Fitted(vocabularies, shifts, min_count, num_rows)


def reuse(folder: str, config: DatasetConfig) -> Fitted:
    """What an earlier prepared folder was fitted on. Raises DataError when it does not fit ``config``."""
    manifest = Manifest.load(folder)
    if manifest.config.format != config.format:
        raise DataError(
            f"vocabulary_from={folder} is of format={manifest.config.format}, this data set of "
            f"format={config.format}: their ids do not mix"
        )
    if manifest.vocabulary.min_count != config.min_count:
        raise DataError(
            f"vocabulary_from={folder} was fitted with min_count={manifest.vocabulary.min_count}, "
            f"the config says {config.min_count}: set min_count={manifest.vocabulary.min_count}"
        )
    return Fitted.load(folder)
