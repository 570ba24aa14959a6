"""Train one model on prepared clicks, evaluate it on the test rows, and save everything.

    recsys-basis train dataset=synthetic row_optimizer=adam
    recsys-basis train experiment=kaggle_137k output_dir=runs/mine seed=1
    torchrun --nproc-per-node 2 -m recsys_basis.train experiment=kaggle_137k

SIGTERM makes it save a checkpoint and exit with 0; resume=auto goes on, also where torchrun restarts it.
The data must have been prepared (``recsys-basis prepare`` with the same dataset).
"""

from __future__ import annotations

from collections.abc import Sequence

from recsys_basis.cli import run_job
from recsys_basis.config import compose_job
from recsys_basis.schema import parse_section
from recsys_basis.training.loop import run_training
from recsys_basis.training.spec import TrainConfig
from recsys_basis.training.stopping import termination_noted


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the job; ``arguments`` are Hydra overrides."""
    return run_job("train", train, arguments)


def train(overrides: list[str]) -> None:
    """Compose, validate, train, print the result."""
    config = parse_section(TrainConfig, compose_job("train", overrides))
    with termination_noted() as stop_asked:
        result = run_training(config, stop_asked=stop_asked)
    if result is not None:
        print(
            f"{result['evaluated_on']} rows {result['num_rows']:,}: AUC {result['auc']:.5f}, "
            f"log loss {result['log_loss']:.5f}, normalized entropy {result['normalized_entropy']:.5f}, "
            f"calibration {result['calibration']:.4f}\n"
            f"run folder: {config.output_dir}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
