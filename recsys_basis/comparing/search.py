"""Each variant's own learning rate, chosen on the last part of the training rows, never on test."""

from __future__ import annotations

from collections.abc import Sequence
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
    log_loss_mean: float
    chosen: bool
    at_edge: bool
    """Chosen, with other rates on one side only: a wider search may find a better one."""


def choose_rates(variants: Sequence[Variant], records: Sequence[RunRecord]) -> list[SearchedRate]:
    """For each variant with several rates, the one with the highest mean holdout AUC is chosen."""
    searched = []
    for variant in variants:
        if len(variant.learning_rates) == 1:
            continue
        rates = sorted(variant.learning_rates)
        of_rate = {
            rate: [run for run in records if (run.variant, run.learning_rate) == (variant.name, rate)]
            for rate in rates
        }
        auc = {rate: fmean(run.metrics.auc for run in runs) for rate, runs in of_rate.items()}
        best = max(rates, key=lambda rate: auc[rate])
        searched += [
            SearchedRate(
                variant=variant.name,
                learning_rate=rate,
                auc_mean=auc[rate],
                log_loss_mean=fmean(run.metrics.log_loss for run in of_rate[rate]),
                chosen=rate == best,
                at_edge=rate == best and best in (rates[0], rates[-1]),
            )
            for rate in rates
        ]
    return searched


def as_objects(searched: Sequence[SearchedRate]) -> list[dict[str, object]]:
    """For search.json."""
    return [asdict(rate) for rate in searched]
