"""Each variant's own learning rate, chosen on the last part of the training rows, never on test.

The rates in the config are a first grid. While a variant's best rate is the lowest or highest tried,
the grid goes on in that direction by its own ratio, so that no rival loses for want of a rate.

Grid: one round, in which every rate trains on all search rows. Successive halving (Jamieson and
Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016):
several rounds, each on four times the rows of the one before, begun anew; after each the better half of a
variant's rates goes on, never fewer than two. Short runs favour larger rates, so in ours a round also
tries the neighbour of its best rate where that is outermost, an eliminated one included: the rate that
is chosen was better than one on either side, on all search rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from recsys_basis.comparing.spec import Variant
from recsys_basis.report.records import RunRecord


@dataclass(frozen=True)
class SearchedRate:
    """What one learning rate of one variant reached on the holdout rows, mean over search seeds."""

    variant: str
    learning_rate: float
    train_rows: int
    """Of its round."""
    auc_mean: float
    """0 where training diverged."""
    log_loss_mean: float | None
    chosen: bool
    at_edge: bool
    """Chosen, though the extensions ran out while a further rate might have been better."""


Rates = Sequence[tuple[Variant, float]]
TrainRates = Callable[[Rates, int], Sequence[RunRecord | None]]
"""Trains each (variant, learning rate) with every search seed on so many rows; None: it diverged."""


def search_rates(
    variants: Sequence[Variant], rows_of_rounds: Sequence[int], extensions: int, train: TrainRates
) -> list[SearchedRate]:
    """The highest mean holdout AUC of each variant that has several rates, and all that were tried.

    Each variant has ``extensions`` rates beyond its grid, in all rounds together.
    """
    several = [variant for variant in variants if len(variant.learning_rates) > 1]
    rounds = {variant.name: list[list[SearchedRate]]() for variant in several}
    wanted = [(variant, rate) for variant in several for rate in variant.learning_rates]
    for train_rows in rows_of_rounds:
        for variant in several:
            rounds[variant.name].append([])
        while wanted:
            records = train(wanted, train_rows)
            for variant, rate in wanted:
                found = _summary(variant, rate, train_rows, records, len(records) // len(wanted))
                rounds[variant.name][-1].append(found)
            wanted = [
                (variant, rate)
                for variant in several
                for rate in [next_rate(rounds[variant.name])]
                if rate is not None and _may_try(rate, rounds[variant.name], variant, extensions)
            ]
        wanted = [(variant, rate) for variant in several for rate in _better_half(rounds[variant.name][-1])]
    return [rate for variant in several for rate in _with_choice(rounds[variant.name])]


def next_rate(rounds: Sequence[Sequence[SearchedRate]]) -> float | None:
    """The rate beyond the best one of the last round, if that is outermost in its round.

    The nearest of an earlier round, else by the ratio of the outermost two of all.
    """
    best, own, known = _best(rounds[-1]).learning_rate, _rates(rounds[-1:]), _rates(rounds)
    place = known.index(best)
    if best == own[0]:
        return known[place - 1] if place > 0 else float(f"{best**2 / known[1]:.6g}")
    if best == own[-1]:
        return known[place + 1] if place + 1 < len(known) else float(f"{best**2 / known[-2]:.6g}")
    return None


def as_objects(searched: Sequence[SearchedRate]) -> list[dict[str, object]]:
    """For search.json."""
    return [asdict(rate) for rate in searched]


def _rates(rounds: Sequence[Sequence[SearchedRate]]) -> list[float]:
    """All rates of all rounds, ascending."""
    return sorted({each.learning_rate for tried in rounds for each in tried})


def _may_try(
    rate: float, rounds: Sequence[Sequence[SearchedRate]], variant: Variant, extensions: int
) -> bool:
    """Whether ``rate`` was tried in some round, or the grid may still be extended."""
    known = _rates(rounds)
    return rate in known or len(known) - len(variant.learning_rates) < extensions


def _best(tried: Sequence[SearchedRate]) -> SearchedRate:
    """Of equals the lowest rate."""
    return max(sorted(tried, key=lambda each: each.learning_rate), key=lambda each: each.auc_mean)


def _better_half(tried: Sequence[SearchedRate]) -> list[float]:
    ordered = sorted(tried, key=lambda each: each.auc_mean, reverse=True)
    return [each.learning_rate for each in ordered[: max(2, (len(ordered) + 1) // 2)]]


def _summary(
    variant: Variant, rate: float, train_rows: int, records: Sequence[RunRecord | None], num_seeds: int
) -> SearchedRate:
    own = [run for run in records if run and (run.variant, run.learning_rate) == (variant.name, rate)]
    whole = len(own) == num_seeds
    return SearchedRate(
        variant=variant.name,
        learning_rate=rate,
        train_rows=train_rows,
        auc_mean=fmean(run.metrics.auc for run in own) if whole else 0.0,
        log_loss_mean=fmean(run.metrics.log_loss for run in own) if whole else None,
        chosen=False,
        at_edge=False,
    )


def _with_choice(rounds: Sequence[Sequence[SearchedRate]]) -> list[SearchedRate]:
    best, at_edge = _best(rounds[-1]), next_rate(rounds) is not None
    return [
        replace(each, chosen=each is best, at_edge=each is best and at_edge)
        for tried in rounds
        for each in sorted(tried, key=lambda each: each.learning_rate)
    ]
