"""Finished runs made of drawn predictions, for every test of the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recsys_basis.metrics.click import click_metrics
from recsys_basis.report.records import RunRecord, write_predictions

NUM_TEST_ROWS = 400


@pytest.fixture
def finished_run(tmp_path: Path) -> Callable[..., RunRecord]:
    """Make ``finished_run(variant, seed, strength=..., **fields)``: a run on 400 rows, the same for all."""
    labels = (np.arange(NUM_TEST_ROWS) % 4 == 0).astype(np.int8)
    shared = np.random.default_rng(0).standard_normal(NUM_TEST_ROWS)

    def make(variant: str, seed: int, strength: float = 1.0, **changes: object) -> RunRecord:
        own = np.random.default_rng([seed, len(variant)]).standard_normal(NUM_TEST_ROWS)
        logits = (strength * labels + shared + 0.1 * own - 1.0).astype(np.float32)
        run_dir = tmp_path / f"{variant}-{seed}"
        run_dir.mkdir()
        write_predictions(run_dir, labels, logits)
        fields: dict[str, object] = {
            "variant": variant,
            "seed": seed,
            "learning_rate": 0.006,
            "metrics": click_metrics(labels, logits),
            "optimizer_bytes": 9_700_000,
            "dense_optimizer_bytes": 12_000,
            "weight_bytes": 4_850_000,
            "rows_per_second": 30_000.0 + 1000 * seed,
            "peak_memory_bytes": 900_000_000 + seed,
            "loss_jitter": 0.03 + 0.01 * seed,
            "run_dir": run_dir,
        }
        return RunRecord(**(fields | changes))  # type: ignore[arg-type]

    return make
