"""Finished runs -> one row a variant: means over seeds, costs, paired AUC difference to the baseline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from recsys_basis.errors import UserError
from recsys_basis.metrics.paired import (
    AucDifference,
    Interval,
    PairedComponents,
    bootstrap_interval,
    delong_interval,
)
from recsys_basis.report.records import RunRecord

logger = logging.getLogger(__name__)

BOOTSTRAP_SEED = 0
"""All variants meet the same resamples, and a repeated comparison gives the same numbers."""


class RunsDifferError(UserError, ValueError):
    """The runs make no table: there are none, or other test rows, a seed twice, a variant of two settings."""


def column(meaning: str, default: Any = MISSING) -> Any:
    """A column of the comparison and what it means, with its unit; ``default`` where it does not apply."""
    return field(metadata={"meaning": meaning}, default=default)


@dataclass(frozen=True, kw_only=True)
class VariantRow:
    """One variant over its seeds. The fields, in order, are the columns of comparison.csv and .json."""

    variant: str = column("name of the variant")
    seeds: tuple[int, ...] = column("seeds it was trained with")
    learning_rate: float = column("learning rate that was searched (comparison.learning_rate_key)")
    auc_mean: float = column("area under the ROC curve on the test rows, mean over seeds")
    auc_std: float | None = column("sample standard deviation of that AUC over seeds; empty with one seed")
    log_loss_mean: float = column("log loss on the test rows in nats a row, mean over seeds")
    ne_mean: float = column(
        "normalized entropy, mean over seeds: log loss over that of always predicting the test click rate"
    )
    calibration_mean: float = column("mean predicted probability over the test click rate, mean over seeds")
    optimizer_bytes: int = column("optimizer state of the embedding rows, in bytes, all ranks together")
    dense_optimizer_bytes: int = column("optimizer state of the dense layers, in bytes")
    weight_bytes: int = column("weights of the embedding tables, in bytes")
    rows_per_second: float | None = column(
        "training rows a second without warm-up, mean over seeds; empty where not measured"
    )
    peak_memory_bytes: int = column("largest resident memory of a process, in bytes, largest over seeds")
    loss_jitter_mean: float | None = column(
        "standard deviation of the training loss over 10 steps, mean over the first 200 steps and seeds"
    )
    auc_difference: float | None = column(
        "AUC less the baseline's, mean over the seeds both were trained with; empty for the baseline",
        None,
    )
    ci_low: float | None = column("lower end of its 95 % interval by bootstrap over seeds and rows", None)
    ci_high: float | None = column("upper end of the same", None)
    non_inferior: bool | None = column(
        "whether ci_low is above -comparison.non_inferiority_margin, and missing_seeds is empty", None
    )
    delong_ci_low: float | None = column(
        "lower end of its 95 % interval by DeLong's covariances over seeds", None
    )
    delong_ci_high: float | None = column("upper end of the same", None)
    delong_non_inferior: bool | None = column("the same of delong_ci_low", None)
    paired_seeds: tuple[int, ...] = column("seeds that auc_difference is taken over")
    missing_seeds: tuple[int, ...] = column(
        "seeds that ended for some variant, but not for both this one and the baseline: runs that diverged",
        (),
    )
    standard_error_rows: float | None = column(
        "part of auc_difference's standard error from the choice of test rows", None
    )
    standard_error_seeds: float | None = column(
        "part of it from the choice of seeds; empty with one seed: the intervals then allow for rows only",
        None,
    )
    seed_differences: tuple[float, ...] = column("the AUC difference of each of paired_seeds", ())
    seed_standard_errors: tuple[float, ...] = column(
        "DeLong's standard error of each, from the rows alone", ()
    )
    num_test_rows: int = column("test rows that were evaluated")


@dataclass(frozen=True)
class Judging:
    """How variants are judged beside ``baseline``."""

    baseline: str
    margin: float
    """AUC that a variant may lose and still be called no worse."""
    num_resamples: int
    """Of the bootstrap."""


@dataclass(frozen=True)
class Difference:
    """What the test rows say of the AUC difference of two variants."""

    delong: AucDifference
    bootstrap: Interval
    margin: float
    missing_seeds: tuple[int, ...]

    def columns(self) -> dict[str, Any]:
        """By field of ``VariantRow``."""
        low, high = self.bootstrap
        # Those that survived say nothing of those that diverged.
        whole = not self.missing_seeds
        return {
            "auc_difference": self.delong.difference,
            "ci_low": low,
            "ci_high": high,
            "non_inferior": whole and low > -self.margin,
            "delong_ci_low": self.delong.ci_low,
            "delong_ci_high": self.delong.ci_high,
            "delong_non_inferior": whole and self.delong.ci_low > -self.margin,
            "missing_seeds": self.missing_seeds,
            "standard_error_rows": self.delong.standard_error_rows,
            "standard_error_seeds": self.delong.standard_error_seeds,
            "seed_differences": self.delong.by_seed,
            "seed_standard_errors": self.delong.seed_standard_errors,
        }


def compare_runs(records: Sequence[RunRecord], judging: Judging) -> list[VariantRow]:
    """One row for each variant in ``records``, in order of appearance; differences are to the baseline.

    Differences are paired by test row and by seed. They are None for the baseline itself, and, with a
    logged warning, where the baseline is missing or shares no seed with the variant.
    Raises RunsDifferError where runs were evaluated on different test rows, a variant has a seed twice,
    its runs differ in learning rate or bytes, or there are no records.
    """
    if not records:
        raise RunsDifferError("there are no finished runs to compare: where all diverged, lower their rates")
    baseline, groups = judging.baseline, _group_by_variant(records)
    all_seeds = {record.seed for record in records}
    labels, logits = _read_predictions(records)
    if baseline not in groups:
        logger.warning("no runs of the baseline %r: the comparison has no AUC differences", baseline)
    rows = []
    for variant, runs in tqdm(groups.items(), desc="intervals", unit="variant", delay=2):
        paired_seeds = _paired_seeds(groups, variant, baseline)
        difference = None
        if paired_seeds:
            of_variant, of_baseline = (
                np.stack([logits[name, seed] for seed in paired_seeds]) for name in (variant, baseline)
            )
            components = PairedComponents.of(labels, of_variant, of_baseline)
            resampled = bootstrap_interval(components, judging.num_resamples, BOOTSTRAP_SEED)
            missing = tuple(sorted(all_seeds - set(paired_seeds)))
            difference = Difference(delong_interval(components), resampled, judging.margin, missing)
        rows.append(_variant_row(runs, difference, paired_seeds))
    return rows


def _group_by_variant(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs of each variant by ascending seed."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(record.variant, []).append(record)
    for variant, runs in groups.items():
        runs.sort(key=lambda run: run.seed)
        for before, after in pairwise(runs):
            if before.seed == after.seed:
                raise RunsDifferError(
                    f"variant {variant} has seed {after.seed} twice: {before.run_dir} and {after.run_dir}"
                )
    return groups


def _read_predictions(
    records: Sequence[RunRecord],
) -> tuple[NDArray[np.int8], dict[tuple[str, int], NDArray[np.float32]]]:
    """Labels [n] that all runs share, and logits [n] by (variant, seed)."""
    labels, _ = records[0].predictions()
    logits = {}
    for record in records:
        own_labels, own_logits = record.predictions()
        if not np.array_equal(own_labels, labels):
            raise RunsDifferError(
                f"{records[0].run_dir} ({len(labels)} test rows, {labels.sum()} clicks) and {record.run_dir} "
                f"({len(own_labels)} rows, {own_labels.sum()} clicks) were not evaluated on the same test "
                "rows in the same order: train both on the same prepared data with the same number of ranks"
            )
        logits[record.variant, record.seed] = own_logits
    return labels, logits


def _paired_seeds(groups: dict[str, list[RunRecord]], variant: str, baseline: str) -> tuple[int, ...]:
    """Seeds that ``variant`` shares with ``baseline``; none for the baseline itself."""
    if variant == baseline or baseline not in groups:
        return ()
    own, other = ({run.seed for run in groups[name]} for name in (variant, baseline))
    if own != other:
        logger.warning(
            "%s has seeds %s, the baseline %s has %s: their AUC difference is over %s only",
            *(variant, sorted(own), baseline, sorted(other), sorted(own & other)),
        )
    return tuple(sorted(own & other))


def _variant_row(
    runs: Sequence[RunRecord], difference: Difference | None, paired_seeds: tuple[int, ...]
) -> VariantRow:
    aucs = [run.metrics.auc for run in runs]
    jitters = [run.loss_jitter for run in runs if run.loss_jitter is not None]
    speeds = [run.rows_per_second for run in runs if run.rows_per_second is not None]
    return VariantRow(
        variant=runs[0].variant,
        seeds=tuple(run.seed for run in runs),
        learning_rate=_shared(runs, "learning_rate"),
        auc_mean=fmean(aucs),
        auc_std=stdev(aucs) if len(aucs) > 1 else None,
        log_loss_mean=fmean(run.metrics.log_loss for run in runs),
        ne_mean=fmean(run.metrics.normalized_entropy for run in runs),
        calibration_mean=fmean(run.metrics.calibration for run in runs),
        optimizer_bytes=_shared(runs, "optimizer_bytes"),
        dense_optimizer_bytes=_shared(runs, "dense_optimizer_bytes"),
        weight_bytes=_shared(runs, "weight_bytes"),
        rows_per_second=fmean(speeds) if speeds else None,
        peak_memory_bytes=max(run.peak_memory_bytes for run in runs),
        loss_jitter_mean=fmean(jitters) if jitters else None,
        paired_seeds=paired_seeds,
        num_test_rows=runs[0].metrics.num_rows,
        **(difference.columns() if difference else {}),
    )


def _shared(runs: Sequence[RunRecord], name: str) -> Any:
    """The value of field ``name``, which every run of a variant must share."""
    values = {run.run_dir: getattr(run, name) for run in runs}
    if len(set(values.values())) > 1:
        found = ", ".join(f"{value} in {run_dir}" for run_dir, value in values.items())
        raise RunsDifferError(f"variant {runs[0].variant} has runs of different {name}: {found}")
    return values[runs[0].run_dir]
