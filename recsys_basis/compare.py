"""Train variants with several seeds on the same data and print AUC beside the baseline's.

    recsys-basis compare experiment=kaggle_137k
    recsys-basis compare experiment=demo comparison=demo
    recsys-basis compare experiment=kaggle_137k 'comparison.seeds=[0,1,2,3,4]' output_dir=runs/five

Prepares the data where that has not been done. Every variant first searches its own learning rate on
the last part of the training rows; then each trains on all of them with every seed. A finished run is
not run again, so an interrupted comparison continues where it was. Writes report.html, and the table as
comparison.csv, .json and .png.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from recsys_basis.cli import run_job
from recsys_basis.comparing.runs import Outcome, PlannedRun, make_runs
from recsys_basis.comparing.search import Rates, SearchedRate, as_objects, search_rates
from recsys_basis.comparing.spec import ComparisonConfig, Variant
from recsys_basis.config import compose_job
from recsys_basis.embeddings.collection import create_tables
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.ingest.spec import SyntheticConfig
from recsys_basis.ingest.synthetic import SyntheticReport, read_truth, synthesize
from recsys_basis.prepare import ensure_prepared
from recsys_basis.report.comparison import Judging, compare_runs
from recsys_basis.report.html import Comparison, write_html
from recsys_basis.report.records import RunRecord
from recsys_basis.report.table import print_comparison
from recsys_basis.report.writers import write_comparison
from recsys_basis.schema import ConfigError, parse_section
from recsys_basis.training.data import count_before_holdout
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
        for key in ("dataset", "max_train_rows"):
            if getattr(config, key) != getattr(first, key):
                raise ConfigError(f"variant {variant.name} overrides {key}: all variants share one")
    truth = ensure_synthesized(comparison.synthetic) if comparison.synthetic else None
    manifest = ensure_prepared(first.dataset)
    for config in configs:  # a mistake in the last variant shows before the first trains
        config.solved_for_tables(create_tables(config.embedding, manifest.cardinalities))
    plan.data_digest = manifest.digest()
    train_rows = count_rows(manifest, 0.0, first.max_train_rows)
    search_rows = count_rows(
        manifest, comparison.search.holdout_fraction, first.max_train_rows, comparison.search.max_rows
    )

    def train_rates(rates: Rates, rows: int) -> Sequence[Outcome]:
        runs = plan.search(rates, rows)
        return make_runs(runs, rows * first.epochs, comparison.parallel_runs, f"search on {rows:,} rows")

    searched = search_rates(
        comparison.variants,
        comparison.search.rows_of_rounds(search_rows),
        comparison.search.extensions,
        train_rates,
    )
    rate_of = {rate.variant: rate.learning_rate for rate in searched if rate.chosen}
    final = plan.final(rate_of)
    outcomes = make_runs(final, train_rows * first.epochs, comparison.parallel_runs, "comparison")
    records = [record for record in outcomes if record is not None]
    notes = [
        f"{run.folder} diverged and is not in the table"
        for run, record in zip(final, outcomes, strict=True)
        if record is None
    ]
    notes += [
        f"{rate.variant}'s best rate {rate.learning_rate:g} is still at the edge of those tried"
        for rate in searched
        if rate.at_edge
    ]
    notes += [words for variant in comparison.variants if (words := plan.fixed_rates(variant))]
    if search_rows == comparison.search.max_rows:
        notes.append(f"rates were searched on {search_rows:,} rows only, which favours somewhat larger ones")
    if truth is not None:
        notes.append(f"no model can do better here than the teacher itself: AUC {truth.bayes_auc:.5f}")
    title = f"{plan.folder.name}: {train_rows:,} training rows, {len(comparison.seeds)} seeds"
    report(title, records, searched, comparison.judging, plan, notes)


def report(
    title: str,
    records: Sequence[RunRecord],
    searched: Sequence[SearchedRate],
    judging: Judging,
    plan: RunPlanner,
    notes: Sequence[str],
) -> None:
    """Judge the runs; write every file of the comparison, print its table."""
    rows = compare_runs(records, judging)
    write_comparison(rows, plan.folder, title, judging)
    write_json(plan.folder / "search.json", as_objects(searched))
    command = shlex.join(["recsys-basis", "compare", *plan.overrides])
    write_html(Comparison(title, rows, records, searched, judging, command, notes), plan.folder)
    print_comparison(rows, title, judging.baseline)
    for note in notes:
        print(f"note: {note}")
    print(f"comparison folder: {plan.folder}")


def count_rows(manifest: Manifest, holdout_fraction: float, *most: int | None) -> int:
    """Rows that a run trains on, of those before its holdout at most ``most`` (None: no bound)."""
    available = count_before_holdout(manifest.splits["train"].num_rows, holdout_fraction)
    return min(available, *(bound for bound in most if bound is not None), available)


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
        self.overrides = tuple(overrides)
        self.folder = folder
        self.data_digest = ""
        # What sets one run apart from the others is not for the command line.
        owned = ("seed", "holdout_fraction", "runtime.threads_per_rank", comparison.learning_rate_key)
        for override in [
            *overrides,
            *(each for variant in comparison.variants for each in variant.overrides),
        ]:
            key = override.lstrip("+~").split("=")[0]
            if key in owned:
                raise ConfigError(
                    f"{override}: the comparison sets {key} of each run; see the section comparison "
                    "(seeds, variants, search.holdout_fraction, parallel_runs)"
                )
        self._overrides = [
            override
            for override in overrides
            if not override.lstrip("+~").startswith(("comparison", "judging"))
        ]

    def search(self, rates: Rates, rows: int) -> list[PlannedRun]:
        """One run on ``rows`` training rows for each variant and learning rate, and each search seed."""
        return [
            PlannedRun(variant.name, self.config(variant, rate, seed, "search", rows), rate, self.data_digest)
            for seed in self.comparison.search.seeds
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

    def fixed_rates(self, variant: Variant) -> str:
        """A sentence where tables that ``table_row_optimizers`` sets apart keep the rates given to them."""
        rate = variant.learning_rates[0]
        given, moved = (
            self.config(variant, each, 0, "check").table_row_optimizers or {} for each in (rate, 2 * rate)
        )
        fixed = [
            f"{tables} {section.learning_rate:g}"
            for tables, section in given.items()
            if section.learning_rate == moved[tables].learning_rate
        ]
        key = self.comparison.learning_rate_key
        words = f"{variant.name} varies {key} alone: tables set apart keep their rates, {', '.join(fixed)}"
        return words if fixed else ""

    def config(
        self,
        variant: Variant,
        learning_rate: float,
        seed: int,
        phase: str,
        search_rows: int | None = None,
    ) -> TrainConfig:
        """The training config of one run; raises ConfigError naming a bad key.

        search_rows: train on so many rows before the holdout, which judges; None: judged on test rows.
        """
        data = ["holdout_fraction=0.0"]
        if search_rows is not None:
            phase = f"{phase}/{search_rows}-rows"
            data = [
                f"holdout_fraction={self.comparison.search.holdout_fraction}",
                f"max_train_rows={search_rows}",
            ]
        threads = max(1, len(os.sched_getaffinity(0)) // self.comparison.parallel_runs)
        values = compose_job(
            "train",
            [
                *self._overrides,
                *variant.overrides,
                f"{self.comparison.learning_rate_key}={learning_rate}",
                f"seed={seed}",
                *data,
                f"runtime.threads_per_rank={threads}",
            ],
        )
        values["output_dir"] = str(
            self.folder / "runs" / phase / variant.name / f"rate-{learning_rate:g}-seed-{seed}"
        )
        return parse_section(TrainConfig, values)


if __name__ == "__main__":
    raise SystemExit(main())
