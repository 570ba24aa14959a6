"""What a prepared folder says of itself: its manifest, and a README for people."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import sys

import recsys_basis
from recsys_basis.ingest.columns import PREPARED_SCHEMA
from recsys_basis.ingest.manifest import (
    ColumnCounts,
    DataFile,
    Manifest,
    Split,
    SplitName,
    VocabularyCounts,
)
from recsys_basis.ingest.spec import DatasetConfig
from recsys_basis.ingest.staging import Staged
from recsys_basis.ingest.vocabulary import Fitted

RECORDED_PACKAGES = ("duckdb", "numpy", "pandas", "pyarrow")


def describe(
    config: DatasetConfig,
    staged: Staged,
    fitted: Fitted,
    vocabulary_files: dict[str, DataFile],
    splits: dict[SplitName, Split],
) -> Manifest:
    """The manifest of a folder whose files are all written."""
    columns = {
        name: ColumnCounts(num_missing=vocabulary.num_missing, num_rare=vocabulary.num_rare)
        for name, vocabulary in fitted.vocabularies.items()
    }
    return Manifest(
        format_version=1,
        columns={field.name: field.type.to_pandas_dtype().__name__ for field in PREPARED_SCHEMA},
        cardinalities={name: vocabulary.num_ids for name, vocabulary in fitted.vocabularies.items()},
        integer_shifts=dict(fitted.integer_shifts),
        splits=splits,
        split_rule=(
            f"by position in time: the last round(rows * {config.test_fraction}) good lines are the test part"
        ),
        vocabulary=VocabularyCounts(min_count=fitted.min_count, num_rows=fitted.num_rows, columns=columns),
        vocabulary_files=vocabulary_files,
        bad_lines=staged.bad_lines,
        sources=staged.sources,
        config=config,
        created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(sys.argv),
        versions={
            "python": platform.python_version(),
            "recsys_basis": recsys_basis.__version__,
            **{name: importlib.metadata.version(name) for name in RECORDED_PACKAGES},
        },
    )


def readme(manifest: Manifest) -> str:
    """Text of the README.md that lies in the prepared folder."""
    train, test = manifest.splits["train"], manifest.splits["test"]
    sources = "\n".join(f"- `{source.path}` ({source.num_lines:,} lines)" for source in manifest.sources)
    fitted_on = "this" if manifest.config.vocabulary_from is None else "an earlier"
    return f"""\
# Prepared clicks

Made by `recsys-basis prepare` on {manifest.created_utc} from

{sources}

| file | what |
|---|---|
| `train/part-*.parquet` | {train.num_rows:,} rows in time order, {train.num_positives:,} of them clicks |
| `test/part-*.parquet` | the {test.num_rows:,} rows after them, {test.num_positives:,} of them clicks |
| `vocabulary/<column>.parquet` | `value` (a raw hex id as a number), its `id`, its training `count` |
| `manifest.json` | columns, cardinalities, shifts, counts, sources, checksums, how it was made |

Columns: `label` 0 or 1; `I1`..`I13` = log1p(max(x + shift, 0)) with the shift of the manifest, and 0.0
where x is missing; `C1`..`C26` ids of the vocabulary: 1, 2, ... by descending count, and 0 for a
value that is missing or was seen fewer than {manifest.vocabulary.min_count} times in the training part.

Vocabularies and shifts were learned from {fitted_on} training part only. To encode later files of the
same log with them: `recsys-basis prepare dataset.vocabulary_from=<this folder>`.
"""
