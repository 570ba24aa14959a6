"""Raw click logs to Parquet, vocabulary and manifest, in three passes.

    recsys-basis prepare dataset=kaggle_137k
    recsys-basis prepare dataset=criteo_kaggle dataset.raw_paths=[train.txt] output_dir=data/kaggle
    recsys-basis prepare dataset=criteo_terabyte 'dataset.raw_paths=[day_0.gz,day_1.gz]'

    1 read    every line is checked and staged as numbers             ingest/staging.py
    2 fit     vocabularies and shifts, from the training part only    ingest/vocabulary.py
    3 encode  ids and scaled integers, split by position in time      ingest/encoding.py

Memory does not grow with the length of the files, only with the vocabulary. The output folder
appears whole or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from recsys_basis.cli import run_job
from recsys_basis.config import compose_job
from recsys_basis.ingest.description import describe, readme
from recsys_basis.ingest.encoding import write_splits
from recsys_basis.ingest.errors import DataError
from recsys_basis.ingest.folders import scratch_folder, whole_folder
from recsys_basis.ingest.manifest import MANIFEST_NAME, Manifest, Source, Split, SplitName, sha256_of
from recsys_basis.ingest.raw_files import size_of
from recsys_basis.ingest.spec import DatasetConfig
from recsys_basis.ingest.staged_table import StagedTable
from recsys_basis.ingest.staging import stage
from recsys_basis.ingest.vocabulary import fit, reuse
from recsys_basis.schema import parse_section

log = logging.getLogger(__name__)

COMPARED_KEYS = ("format", "min_count", "test_fraction", "on_bad_line", "row_group_rows")
"""Settings of a prepared folder that must be those of the config that uses it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the job; ``arguments`` are Hydra overrides."""
    return run_job("prepare", lambda overrides: prepare(parse(overrides)), arguments)


def parse(overrides: list[str]) -> DatasetConfig:
    """The validated config of configs/prepare.yaml under ``overrides``; output_dir is where it writes."""
    values = compose_job("prepare", overrides)
    return parse_section(DatasetConfig, values["dataset"] | {"prepared_dir": values["output_dir"]}, "dataset")


def prepare(config: DatasetConfig) -> Manifest:
    """Prepare ``config.raw_paths`` into ``config.prepared_dir``; returns its manifest.

    Raises DataError naming what cannot be used (BadLine for a line of a raw file); nothing is
    left behind then, and an existing folder stays as it was.
    """
    target = Path(config.prepared_dir)
    with (
        whole_folder(target, config.overwrite, marker=MANIFEST_NAME) as folder,
        scratch_folder(target) as scratch,
    ):
        reused = reuse(config.vocabulary_from, config) if config.vocabulary_from else None

        staged = stage(config, scratch / "lines.parquet")
        rows_of = split_by_time(staged.num_rows, config.test_fraction)
        table = StagedTable(staged.path)
        positives_of = count_positives(table, rows_of)

        fitted = reused or fit(table, rows_of["train"], config.min_count)
        vocabulary = fitted.save(folder)

        files_of = write_splits(staged.path, folder, fitted, rows_of, config.row_group_rows)
        splits = {
            name: Split(num_rows=rows, num_positives=positives_of[name], files=files_of[name])
            for name, rows in rows_of.items()
        }
        manifest = describe(config, staged, fitted, vocabulary, splits)
        manifest.save(folder)
        (folder / "README.md").write_text(readme(manifest), encoding="utf-8")
    report(manifest)
    return manifest


def split_by_time(num_rows: int, test_fraction: float) -> dict[SplitName, int]:
    """Rows of the training part, and of the test part after it.

    Raises DataError when a part is empty, unless ``test_fraction`` is 0 and it is the test part.
    """
    test_rows = round(num_rows * test_fraction)
    if test_rows == num_rows:
        raise DataError(f"no training rows: {num_rows} good lines with test_fraction={test_fraction}")
    if test_rows == 0 and test_fraction > 0:
        raise DataError(
            f"no test rows: {num_rows} good lines with test_fraction={test_fraction}; "
            "set it to 0 for no test part"
        )
    return {"train": num_rows - test_rows, "test": test_rows}


def count_positives(table: StagedTable, rows_of: dict[SplitName, int]) -> dict[SplitName, int]:
    """Clicks of each part. Raises DataError when the training part has one class only."""
    train_rows = rows_of["train"]
    positives = table.count_positives(0, train_rows)
    if positives in (0, train_rows):
        raise DataError(f"all {train_rows} training rows have label {int(positives > 0)}: nothing to learn")
    return {"train": positives, "test": table.count_positives(train_rows, sum(rows_of.values()))}


def ensure_prepared(config: DatasetConfig) -> Manifest:
    """The manifest of ``config.prepared_dir``, which is prepared first if it is absent or to be overwritten.

    Raises DataError naming the key in which an existing folder differs from ``config``, or the raw
    file that is not the one it was made from.
    """
    if config.overwrite or not Path(config.prepared_dir).exists():
        return prepare(config)
    manifest = Manifest.load(config.prepared_dir)
    refuse_other_settings(manifest, config)
    if not _has_vocabulary_of(manifest, config.vocabulary_from):
        raise _stale(config, f"its vocabulary is not that of vocabulary_from={config.vocabulary_from}")
    num_sources = len(manifest.sources)
    if num_sources != len(config.raw_paths):
        raise _stale(config, f"raw_paths had {num_sources} files, the config names {len(config.raw_paths)}")
    for source, raw_path in zip(manifest.sources, config.raw_paths, strict=True):
        if not _is_same_file(source, Path(raw_path)):
            raise _stale(config, f"raw_paths: {raw_path} is not the {source.path} that it was made from")
    return manifest


def refuse_other_settings(manifest: Manifest, config: DatasetConfig) -> None:
    """Raise DataError naming the key in which the data of ``manifest`` differs from ``config``."""
    for key in COMPARED_KEYS:
        prepared, wanted = getattr(manifest.config, key), getattr(config, key)
        if prepared != wanted:
            raise _stale(config, f"{key} was {prepared}, the config says {wanted}")


def report(manifest: Manifest) -> None:
    """Log what was prepared, and a warning for lines that were left out or padded."""
    log.info("prepared folder: %s", manifest.config.prepared_dir)
    for name, split in manifest.splits.items():
        log.info("%s: %d rows, %d clicks", name, split.num_rows, split.num_positives)
    bad = manifest.bad_lines
    for kind, first in bad.first.items():
        log.warning("skipped %d lines: %s; the first: %s", getattr(bad, kind), kind, first)
    if bad.padded:
        log.warning("padded %d short lines with empty columns", bad.padded)


def _stale(config: DatasetConfig, reason: str) -> DataError:
    return DataError(
        f"{config.prepared_dir} was prepared otherwise: {reason}; "
        "name another prepared_dir, or set overwrite=true to prepare it anew"
    )


def _has_vocabulary_of(manifest: Manifest, folder: str | None) -> bool:
    if folder is None or manifest.config.vocabulary_from is None:
        return folder == manifest.config.vocabulary_from
    other = Manifest.load(folder)
    return (manifest.vocabulary, manifest.cardinalities, manifest.integer_shifts) == (
        other.vocabulary,
        other.cardinalities,
        other.integer_shifts,
    )


def _is_same_file(source: Source, path: Path) -> bool:
    """Whether ``path`` has the content that ``source`` had; it is read again only if it was touched since."""
    if size_of(path) != source.num_bytes:
        return False
    return path.stat().st_mtime_ns == source.modified_ns or sha256_of(path) == source.sha256


if __name__ == "__main__":
    raise SystemExit(main())
