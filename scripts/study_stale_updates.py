"""What rows cost that are updated one step late, as TorchRec's semi-synchronous pipeline does: AUC, by pairs.

    python scripts/study_stale_updates.py --seeds 5 --output runs/stale

There the lookup of batch t + 1 runs before the update of batch t, so that exchange and lookup hide behind
the step before. Here each row optimizer trains as it does and with just that delay of its rows (towers are
never late), at each of three rates about the one that the comparison of the shelf found, on the last eighth
of the training rows; then with every seed on all of them at the better rate, judged on test rows.
A finished run is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recsys_basis.comparing.runs import PlannedRun
from recsys_basis.config import compose_job
from recsys_basis.embeddings import kernel
from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.features import RowGradients
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.report.comparison import Judging, compare_runs
from recsys_basis.report.table import print_comparison
from recsys_basis.schema import parse_section
from recsys_basis.training.loop import run_training
from recsys_basis.training.spec import TrainConfig

RATES = {"basis": 0.002, "adam": 0.002, "rowwise_adagrad": 0.04}
LATE = "_late"


class LateBags(RowOptimizedEmbeddingBags):
    """Backward of batch t + 1 applies the update of batch t; the last one is never applied."""

    waiting: RowGradients | None = None

    def receive(self, gradients: RowGradients) -> None:
        gradients, self.waiting = self.waiting, gradients  # type: ignore[assignment]
        if gradients is not None:
            super().receive(gradients)


@contextmanager
def rows_late(late: bool) -> Iterator[None]:
    """Inside, models are built with ``LateBags`` if ``late``."""
    usual = kernel.RowOptimizedEmbeddingBags
    kernel.RowOptimizedEmbeddingBags = LateBags if late else usual  # type: ignore[misc]
    try:
        yield
    finally:
        kernel.RowOptimizedEmbeddingBags = usual  # type: ignore[misc]


def train(variant: str, rate: float, seed: int, output: Path, *settings: str) -> PlannedRun:
    """One run on one thread, unless its folder has it; judged on the last eighth of the training rows
    where ``settings`` say so."""
    name = "-".join([variant, f"{rate:g}", str(seed), *(["search"] if settings else [])])
    values = compose_job(
        "train",
        [
            "experiment=kaggle_137k",
            f"row_optimizer={variant.removesuffix(LATE)}",
            f"row_optimizer.learning_rate={rate}",
            f"seed={seed}",
            "diagnostics_every_steps=null",
            "runtime.device=cpu",
            "runtime.threads_per_rank=1",
            f"output_dir={output / name}",
            *settings,
        ],
    )
    config = parse_section(TrainConfig, values)
    run = PlannedRun(variant, config, rate, Manifest.load(config.dataset.prepared_dir).digest())
    if not run.is_finished():
        with rows_late(variant.endswith(LATE)):
            run_training(config, on_rows=lambda rows: None)
    return run


def best_rate(variant: str, output: Path) -> float:
    """Of half, once and twice the shelf's rate, by AUC on rows held out."""
    usual = RATES[variant.removesuffix(LATE)]

    def auc(rate: float) -> float:
        run = train(variant, rate, 0, output, "holdout_fraction=0.125")
        found: dict[str, Any] = json.loads((run.folder / "result.json").read_text())
        return float(found["auc"])

    return max((usual / 2, usual, usual * 2), key=auc)


def main() -> None:
    """Search, train, and print a table for each row optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rules", default=",".join(RATES), help="row optimizers, separated by commas")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    for rule in options.rules.split(","):
        variants = (rule, rule + LATE)
        rates = {variant: best_rate(variant, options.output) for variant in variants}
        runs = [
            train(variant, rates[variant], seed, options.output)
            for seed in range(options.seeds)
            for variant in variants
        ]
        judging = Judging(baseline=rule, margin=0.0005, num_resamples=2000)
        rows = compare_runs([run.record() for run in runs], judging)
        print_comparison(rows, f"{rule}: rows one step late, {options.seeds} seeds", rule)


if __name__ == "__main__":
    main()
