"""Train variants with several seeds on the same data and print AUC beside the baseline's.

    recsys-basis compare experiment=kaggle_137k
    recsys-basis compare experiment=demo comparison=demo
    recsys-basis compare experiment=kaggle_137k 'comparison.seeds=[0,1,2,3,4]' output_dir=runs/five

Prepares the data where that has not been done. Every variant first searches its own learning rate on
the last part of the training rows; then each trains on all of them with every seed. A finished run is
not run again, so an interrupted comparison continues where it was. Writes comparison.csv, .json, .png.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from recsys_basis.cli import run_job
from recsys_basis.comparing.runs import PlannedRun, make_runs
from recsys_basis.comparing.search import as_objects, search_rates
from recsys_basis.comparing.spec import ComparisonConfig, Variant
from recsys_basis.config import compose_job
from recsys_basis.ingest.spec import SyntheticConfig
from recsys_basis.ingest.synthetic import SyntheticReport, read_truth, synthesize
from recsys_basis.prepare import ensure_prepared
from recsys_basis.report.comparison import compare_runs
from recsys_basis.report.table import print_comparison
from recsys_basis.report.writers import write_comparison
from recsys_basis.schema import ConfigError, parse_section
from recsys_basis.training.build import create_tables, row_optimizers_of
from recsys_basis.training.run_folder import write_json
from recsys_basis.training.spec import TrainConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the job; ``arguments`` are Hydra overrides."""
    return run_job("compare", compare, arguments)


def compare(overrides: list[str]) -> None:
    """Prepare, search, train, judge, print."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("compare runs alone, not under torchrun: it starts its runs itself")
    values = compose_job("compare", overrides)
    comparison = parse_section(ComparisonConfig, values.pop("comparison"), where="comparison")
    plan = RunPlanner(comparison, overrides, Path(values["output_dir"]))
    with only_user_of(plan.folder):
        run_comparison(comparison, plan)


def run_comparison(comparison: ComparisonConfig, plan: RunPlanner) -> None:
    """The work of the job, for its only process on this folder."""
    first = plan.config(comparison.variants[0], 1.0, 0, "check")
    configs = [plan.config(each, each.learning_rates[0], 0, "check") for each in comparison.variants]
    for variant, config in zip(comparison.variants, configs, strict=True):
        if config.dataset != first.dataset:
            raise ConfigError(f"variant {variant.name} overrides the dataset: all variants share one")
    truth = ensure_synthesized(comparison.synthetic) if comparison.synthetic else None
    manifest = ensure_prepared(first.dataset)
    for config in configs:  # a mistake in the last variant shows before the first trains
        row_optimizers_of(config, create_tables(config, manifest))
    plan.data_digest = manifest.digest()
    train_rows = manifest.splits["train"].num_rows
    final_rows = train_rows * first.epochs
    search_rows = round(final_rows * (1.0 - comparison.search_holdout_fraction))

    searched = search_rates(
        comparison.variants,
        comparison.search_extensions,
        lambda rates: make_runs(plan.search(rates), search_rows, comparison.parallel_runs, "search"),
    )
    rate_of = {rate.variant: rate.learning_rate for rate in searched if rate.chosen}
    final = plan.final(rate_of)
    outcomes = make_runs(final, final_rows, comparison.parallel_runs, "comparison")
    records = [record for record in outcomes if record is not None]
    for run, record in zip(final, outcomes, strict=True):
        if record is None:
            print(f"note: {run.folder} diverged and is not in the table")

    rows = compare_runs(records, comparison.baseline)
    title = f"{plan.folder.name}: {train_rows:,} training rows, {len(comparison.seeds)} seeds"
    write_comparison(rows, plan.folder, title, comparison.baseline)
    write_json(plan.folder / "search.json", as_objects(searched))
    print_comparison(rows, title, comparison.baseline)
    if truth is not None:
        print(f"no model can do better here than the teacher itself: AUC {truth.bayes_auc:.5f}")
    for rate in searched:
        if rate.at_edge:
            print(
                f"note: {rate.variant}'s best rate {rate.learning_rate:g} is still at the edge of those tried"
            )
    print(f"comparison folder: {plan.folder}")


@contextmanager
def only_user_of(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process. Raises ConfigError if another comparison holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"output_dir = {folder}: another comparison is running there") from None
        yield


def ensure_synthesized(config: SyntheticConfig) -> SyntheticReport:
    """The truth about the clicks at ``config.path``, which are written first where they are missing."""
    return read_truth(config) if Path(config.path).exists() else synthesize(config)


class RunPlanner:
    """Composes the training config of each run of a comparison."""

    def __init__(self, comparison: ComparisonConfig, overrides: Sequence[str], folder: Path) -> None:
        self.comparison = comparison
        self.folder = folder
        self.data_digest = ""
        owned = ("seed", "holdout_fraction", "runtime.threads_per_rank", comparison.learning_rate_key)
        for override in [
            *overrides,
            *(each for variant in comparison.variants for each in variant.overrides),
        ]:
            key = override.lstrip("+~").split("=")[0]
            if key in owned:
                raise ConfigError(
                    f"{override}: the comparison sets {key} of each run; see the section comparison "
                    "(seeds, learning_rates, search_holdout_fraction, parallel_runs)"
                )
        self._overrides = [
            override for override in overrides if not override.lstrip("+~").startswith("comparison")
        ]

    def search(self, rates: Sequence[tuple[Variant, float]]) -> list[PlannedRun]:
        """One run for each variant and learning rate, and each search seed."""
        return [
            PlannedRun(variant.name, self.config(variant, rate, seed, "search"), rate, self.data_digest)
            for seed in self.comparison.search_seeds
            for variant, rate in rates
        ]

    def final(self, rate_of: dict[str, float]) -> list[PlannedRun]:
        """One run for each variant and seed, at the searched rate or else its only one."""
        return [
            PlannedRun(variant.name, self.config(variant, rate, seed, "final"), rate, self.data_digest)
            for seed in self.comparison.seeds
            for variant in self.comparison.variants
            for rate in [rate_of.get(variant.name, variant.learning_rates[0])]
        ]

    def config(self, variant: Variant, learning_rate: float, seed: int, phase: str) -> TrainConfig:
        """The training config of one run; raises ConfigError naming a bad key."""
        holdout = self.comparison.search_holdout_fraction if phase == "search" else 0.0
        threads = max(1, len(os.sched_getaffinity(0)) // self.comparison.parallel_runs)
        values = compose_job(
            "train",
            [
                *self._overrides,
                *variant.overrides,
                f"{self.comparison.learning_rate_key}={learning_rate}",
                f"seed={seed}",
                f"holdout_fraction={holdout}",
                f"runtime.threads_per_rank={threads}",
            ],
        )
        values["output_dir"] = str(
            self.folder / "runs" / phase / variant.name / f"rate-{learning_rate:g}-seed-{seed}"
        )
        return parse_section(TrainConfig, values)


if __name__ == "__main__":
    raise SystemExit(main())
