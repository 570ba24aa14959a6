"""Which rates are tried and which is chosen, for a known curve of quality over the rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from recsys_basis.comparing.search import Rates, SearchedRate, search_rates
from recsys_basis.comparing.spec import Variant
from recsys_basis.metrics.click import ClickMetrics
from recsys_basis.report.records import RunRecord


def variant(name: str, *rates: float) -> Variant:
    return Variant(name=name, overrides=(), learning_rates=rates)


class Trainer:
    """AUC falls with the distance of log(rate) from a variant's best; seeds disagree by a little."""

    def __init__(self, **best: float) -> None:
        self.best = best
        self.tried: list[list[tuple[str, float]]] = []
        self.rows: list[int] = []

    def __call__(self, rates: Rates, train_rows: int) -> list[RunRecord]:
        self.tried.append([(each.name, rate) for each, rate in rates])
        self.rows.append(train_rows)
        return [
            RunRecord(
                variant=each.name,
                seed=seed,
                learning_rate=rate,
                metrics=self.metrics(each.name, rate, seed),
                optimizer_bytes=1,
                dense_optimizer_bytes=1,
                weight_bytes=1,
                rows_per_second=None,
                peak_memory_bytes=1,
                loss_jitter=None,
                run_dir=Path("nowhere"),
            )
            for seed in (0, 1)
            for each, rate in rates
        ]

    def metrics(self, name: str, rate: float, seed: int) -> ClickMetrics:
        auc = 0.8 - 0.01 * abs(math.log(rate / self.best[name])) + (0.001 if seed else -0.001)
        return ClickMetrics(auc, 0.5, 0.9, 1.0, 0.25, 100)


def chosen(searched: Sequence[SearchedRate], name: str) -> SearchedRate:
    (found,) = (each for each in searched if each.variant == name and each.chosen)
    return found


def test_the_best_rate_of_each_variant_is_chosen() -> None:
    trainer = Trainer(a=0.2, b=0.3)
    searched = search_rates([variant("a", 0.1, 0.2, 0.4), variant("b", 0.1, 0.3, 0.9)], [800], 3, trainer)
    assert (chosen(searched, "a").learning_rate, chosen(searched, "b").learning_rate) == (0.2, 0.3)
    assert chosen(searched, "a").auc_mean == pytest.approx(0.8)
    assert len(trainer.tried) == 1


def test_rates_go_on_past_the_edge_on_either_side_until_the_best_is_inside() -> None:
    trainer = Trainer(low=0.025, high=0.8)
    searched = search_rates([variant("low", 0.1, 0.2), variant("high", 0.1, 0.2)], [800], 5, trainer)
    assert chosen(searched, "low").learning_rate == pytest.approx(0.025)
    assert chosen(searched, "high").learning_rate == pytest.approx(0.8)
    assert sorted(each.learning_rate for each in searched if each.variant == "low") == pytest.approx(
        [0.0125, 0.025, 0.05, 0.1, 0.2]
    )
    assert not any(each.at_edge for each in searched)


def test_the_search_ends_and_says_that_it_is_at_the_edge() -> None:
    trainer = Trainer(a=100.0)
    searched = search_rates([variant("a", 0.1, 0.2)], [800], 2, trainer)
    assert chosen(searched, "a").learning_rate == pytest.approx(0.8) and chosen(searched, "a").at_edge
    assert [len(round) for round in trainer.tried] == [2, 1, 1]


def test_a_rate_that_diverges_loses() -> None:
    trainer = Trainer(a=0.4)

    def train(rates: Rates, train_rows: int) -> list[RunRecord | None]:
        return [None if record.learning_rate > 0.3 else record for record in trainer(rates, train_rows)]

    searched = search_rates([variant("a", 0.1, 0.2, 0.4)], [800], 3, train)
    assert chosen(searched, "a").learning_rate == 0.2
    (lost,) = (each for each in searched if each.learning_rate == 0.4)
    assert lost.auc_mean == 0.0 and lost.log_loss_mean is None


def test_a_variant_with_one_rate_is_not_searched() -> None:
    trainer = Trainer(b=0.2)
    searched = search_rates([variant("a", 0.1), variant("b", 0.1, 0.2, 0.4)], [800], 3, trainer)
    assert {each.variant for each in searched} == {"b"}
    assert search_rates([variant("a", 0.1)], [800], 3, trainer) == []


class Drifting(Trainer):
    """More rows want a lower rate: on 100, 400 and 1600 rows 4, 2 and 1 times the final best."""

    def metrics(self, name: str, rate: float, seed: int) -> ClickMetrics:
        return super().metrics(name, rate / (1600 / self.rows[-1]) ** 0.5, seed)


def test_halving_keeps_the_better_half_and_the_best_has_a_worse_neighbour_on_either_side() -> None:
    trainer = Drifting(a=0.45, b=0.3)
    variants = [variant("a", 0.2, 0.4, 0.8, 1.6, 3.2), variant("b", 0.3, 0.9)]
    searched = search_rates(variants, [100, 400, 1600], 1, trainer)

    def tried(name: str, rows: int) -> list[float]:
        return [
            rate
            for rates, on_rows in zip(trainer.tried, trainer.rows, strict=True)
            for of, rate in rates
            if (of, on_rows) == (name, rows)
        ]

    assert tried("a", 100) == [0.2, 0.4, 0.8, 1.6, 3.2]  # best at 1.8
    assert tried("a", 400) == [1.6, 3.2, 0.8, 0.4]  # at 0.9: three were kept, 0.4 lies beyond the best
    assert tried("a", 1600) == [0.8, 1.6, 0.4, 0.2]  # at 0.45
    assert tried("b", 100) == [0.3, 0.9, 2.7]  # at 1.2: extended once, and then no more
    assert tried("b", 400) == [0.9, 2.7, 0.3]  # at 0.6
    assert tried("b", 1600) == [0.9, 0.3]  # at 0.3, and a lower rate is not to be tried
    a, b = chosen(searched, "a"), chosen(searched, "b")
    assert (a.learning_rate, a.train_rows, a.at_edge) == (0.4, 1600, False)
    assert (b.learning_rate, b.train_rows, b.at_edge) == (0.3, 1600, True)
