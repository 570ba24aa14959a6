"""Raw Criteo-format lines of clicks whose best possible AUC is known (``teacher.py``).

The Bayes AUC and log loss are those of the true probabilities against the drawn labels: what a
perfect model would reach on these very rows. A learned AUC is read against them.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow.csv
from sklearn.metrics import log_loss, roc_auc_score
from tqdm import tqdm

from recsys_basis.atomic import written_whole
from recsys_basis.ingest.errors import DataError
from recsys_basis.ingest.spec import SyntheticConfig
from recsys_basis.ingest.teacher import Teacher
from recsys_basis.schema import Section

CHUNK_ROWS = 1 << 16
"""Rows drawn at a time, each chunk with a seed of its own."""
GZIP_LEVEL = 1
TSV = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")


class SyntheticReport(Section):
    """What was written and how well it can be predicted; kept beside the raw file as JSON."""

    path: str
    num_rows: int
    num_clicks: int
    num_distinct_values: int
    """(column, value) pairs that occur."""
    num_test_rows: int
    bayes_auc: float
    bayes_log_loss: float
    config: SyntheticConfig


def synthesize(config: SyntheticConfig) -> SyntheticReport:
    """Write the raw file and ``<path>.truth.json``, whole or not at all; prints and returns the latter.

    Raises DataError when the file exists and ``overwrite`` is false, or when the test part has one
    class only.
    """
    path, truth_path = Path(config.path), Path(f"{config.path}.truth.json")
    if path.exists() and not config.overwrite:
        raise DataError(f"{path} already exists: name another path, or set overwrite=true")
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as new_path, written_whole(truth_path) as new_truth:
        report = _write_rows(config, new_path)
        new_truth.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print(
        f"{path}: {report.num_rows:,} rows, {report.num_clicks / report.num_rows:.1%} clicks, "
        f"{report.num_distinct_values:,} distinct values; Bayes AUC {report.bayes_auc:.4f} and "
        f"log loss {report.bayes_log_loss:.4f} on the last {report.num_test_rows:,} rows"
    )
    return report


def read_truth(config: SyntheticConfig) -> SyntheticReport:
    """The truth of the file at ``config.path``, written by an earlier ``synthesize``.

    Raises DataError when it is missing or unreadable, or the file was drawn with other settings.
    """
    path = Path(f"{config.path}.truth.json")
    try:
        report = SyntheticReport.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): run `recsys-basis synthesize` again") from error
    wanted, found = (each.model_dump(exclude={"path", "overwrite"}) for each in (config, report.config))
    differing = [key for key in wanted if wanted[key] != found[key]]
    if differing:
        raise DataError(
            f"{config.path} was drawn with another {', '.join(differing)}: name another path, or remove it"
        )
    return report


def _write_rows(config: SyntheticConfig, path: Path) -> SyntheticReport:
    teacher = Teacher(config)
    num_test_rows = round(config.rows * config.test_fraction)
    labels = np.empty(config.rows, dtype=np.int8)
    probabilities = np.empty(config.rows)
    is_seen = [np.zeros(len(column.texts), dtype=bool) for column in teacher.sparse_columns]
    with (
        _raw_writer(path, is_gzip=config.path.endswith(".gz")) as file,
        tqdm(total=config.rows, desc="synthesize", unit="row", unit_scale=True) as progress,
    ):
        for index, start in enumerate(range(0, config.rows, CHUNK_ROWS)):
            stop = min(start + CHUNK_ROWS, config.rows)
            clicks = teacher.draw(stop - start, np.random.default_rng((config.seed, 2, index)))
            pyarrow.csv.write_csv(clicks.table, file, TSV)
            labels[start:stop], probabilities[start:stop] = clicks.labels, clicks.probabilities
            for seen, ranks in zip(is_seen, clicks.ranks, strict=True):
                seen[ranks] = True
            progress.update(stop - start)
    test = slice(config.rows - num_test_rows, None)
    if labels[test].min(initial=1) == labels[test].max(initial=0):
        raise DataError(f"the last {num_test_rows} rows have one class only: raise rows or click_rate")
    return SyntheticReport(
        path=config.path,
        num_rows=config.rows,
        num_clicks=int(labels.sum()),
        # Rank 0 is a missing value.
        num_distinct_values=sum(int(seen[1:].sum()) for seen in is_seen),
        num_test_rows=num_test_rows,
        bayes_auc=float(roc_auc_score(labels[test], probabilities[test])),
        bayes_log_loss=float(log_loss(labels[test], probabilities[test])),
        config=config,
    )


@contextmanager
def _raw_writer(path: Path, is_gzip: bool) -> Iterator[IO[bytes] | gzip.GzipFile]:
    with open(path, "wb") as file:
        if not is_gzip:
            yield file
            return
        # Neither the name nor the time goes into the file: the same config gives the same bytes.
        with gzip.GzipFile("", "wb", GZIP_LEVEL, file, mtime=0) as compressed:
            yield compressed
