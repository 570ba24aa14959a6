"""Each variant's own learning rate, chosen on the last part of the training rows, never on test.

The rates in the config are a first grid. While a variant's best rate is the lowest or highest tried,
the grid goes on in that direction by its own ratio, so that no rival loses for want of a rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from recsys_basis.comparing.spec import Variant
from recsys_basis.report.records import RunRecord


@dataclass(frozen=True)
class SearchedRate:
    """What one learning rate of one variant reached on the holdout rows, mean over search seeds."""

    variant: str
    learning_rate: float
    auc_mean: float
    """0 where training diverged."""
    log_loss_mean: float | None
    chosen: bool
    at_edge: bool
    """Chosen, though the extensions ran out while a further rate might have been better."""


TrainRates = Callable[[Sequence[tuple[Variant, float]]], Sequence[RunRecord | None]]
"""Trains each (variant, learning rate) with every search seed; None for a run that diverged."""


def search_rates(variants: Sequence[Variant], extensions: int, train: TrainRates) -> list[SearchedRate]:
    """The highest mean holdout AUC of each variant that has several rates, and all that were tried."""
    several = [variant for variant in variants if len(variant.learning_rates) > 1]
    wanted = [(variant, rate) for variant in several for rate in variant.learning_rates]
    searched: dict[str, list[SearchedRate]] = {variant.name: [] for variant in several}
    for _ in range(extensions + 1):
        if not wanted:
            break
        records = train(wanted)
        for variant, rate in wanted:
            searched[variant.name].append(_summary(variant, rate, records, len(records) // len(wanted)))
        beyond = [(variant, next_rate(searched[variant.name])) for variant in several]
        wanted = [(variant, rate) for variant, rate in beyond if rate is not None]
    return [rate for variant in several for rate in _with_choice(searched[variant.name])]


def next_rate(tried: Sequence[SearchedRate]) -> float | None:
    """The rate beyond the best one, by the ratio of the outermost two, if the best is outermost."""
    ordered = sorted(tried, key=lambda each: each.learning_rate)
    best = max(range(len(ordered)), key=lambda place: ordered[place].auc_mean)
    rates = [each.learning_rate for each in ordered]
    if best == 0:
        return float(f"{rates[0] ** 2 / rates[1]:.6g}")
    if best == len(rates) - 1:
        return float(f"{rates[-1] ** 2 / rates[-2]:.6g}")
    return None


def as_objects(searched: Sequence[SearchedRate]) -> list[dict[str, object]]:
    """For search.json."""
    return [asdict(rate) for rate in searched]


def _summary(
    variant: Variant, rate: float, records: Sequence[RunRecord | None], num_seeds: int
) -> SearchedRate:
    own = [run for run in records if run and (run.variant, run.learning_rate) == (variant.name, rate)]
    whole = len(own) == num_seeds
    return SearchedRate(
        variant=variant.name,
        learning_rate=rate,
        auc_mean=fmean(run.metrics.auc for run in own) if whole else 0.0,
        log_loss_mean=fmean(run.metrics.log_loss for run in own) if whole else None,
        chosen=False,
        at_edge=False,
    )


def _with_choice(tried: Sequence[SearchedRate]) -> list[SearchedRate]:
    best = max(tried, key=lambda each: each.auc_mean)
    at_edge = next_rate(tried) is not None
    return [
        SearchedRate(**asdict(each) | {"chosen": each is best, "at_edge": each is best and at_edge})
        for each in sorted(tried, key=lambda each: each.learning_rate)
    ]
