"""Which rows a run trains on and which judge it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.tiny import tiny_config

from recsys_basis.batches.parquet import Columns
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.training.data import open_row_groups


@pytest.mark.parametrize(
    ("settings", "trained", "judged"),
    [
        (("holdout_fraction=0.25", "max_train_rows=1000"), slice(1400, 2400), ("train", slice(2400, 3200))),
        (("holdout_fraction=0.25", "max_train_rows=9999"), slice(0, 2400), ("train", slice(2400, 3200))),
        (("max_train_rows=1000",), slice(2200, 3200), ("test", slice(0, 800))),
    ],
)
def test_max_train_rows_are_the_last_ones_before_those_that_judge(
    settings: tuple[str, ...],
    trained: slice,
    judged: tuple[str, slice],
    prepared: Path,
    tmp_path: Path,
) -> None:
    config = tiny_config(prepared, tmp_path, *settings)
    split, rows = judged
    for groups, name, expected in zip(
        open_row_groups(config, Manifest.load(prepared)), ("train", split), (trained, rows), strict=True
    ):
        found = Columns.join([group.read() for group in groups])
        whole = pq.read_table(prepared / name)
        np.testing.assert_array_equal(found.label, whole["label"].to_numpy()[expected])
        np.testing.assert_array_equal(found.sparse[2], whole["C3"].to_numpy()[expected])
