"""Sentences say what the intervals say, no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from recsys_basis.report.comparison import Judging, VariantRow, compare_runs
from recsys_basis.report.records import RunRecord
from recsys_basis.report.words import headlines

JUDGING = Judging("adam", margin=0.0005, num_resamples=200)


@pytest.fixture
def rows(finished_run: Callable[..., RunRecord]) -> list[VariantRow]:
    runs = [finished_run("adam", seed) for seed in range(5)]
    runs += [finished_run("basis", seed, strength=0.99, optimizer_bytes=97_000) for seed in range(5)]
    return compare_runs(runs, JUDGING)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.0001, 0.002, "basis is better than adam"),
        (-0.002, -0.0001, "basis is worse than adam"),
        (-0.001, 0.002, "basis is not told apart from adam"),
        (0.0, 0.001, "basis is not told apart from adam"),
        (-0.001, 0.0, "basis is not told apart from adam"),
    ],
)
def test_the_interval_gives_the_verdict(low: float, high: float, words: str, rows: list[VariantRow]) -> None:
    adam, basis = rows
    (sentence,) = headlines([adam, replace(basis, ci_low=low, ci_high=high)], JUDGING)
    assert sentence.startswith(words)
    numbers = f"{basis.auc_mean:.5f} against {adam.auc_mean:.5f}", f"{low:+.5f} to {high:+.5f}"
    assert all(number in sentence for number in (*numbers, "5 seeds", "400 test rows"))


@pytest.mark.parametrize(
    ("bootstrap", "delong", "words"),
    [
        (True, True, "loses less than 0.0005 AUC by both"),
        (True, False, "by bootstrap, but DeLong's interval does not show"),
        (False, True, "By DeLong's interval it loses less than 0.0005 AUC, but the bootstrap does not"),
        (False, False, "That it loses less than 0.0005 AUC is not shown"),
    ],
)
def test_a_small_loss_is_claimed_as_far_as_shown(
    bootstrap: bool, delong: bool, words: str, rows: list[VariantRow]
) -> None:
    adam, basis = rows
    basis = replace(basis, non_inferior=bootstrap, delong_non_inferior=delong)
    assert words in headlines([adam, basis], JUDGING)[0]


@pytest.mark.parametrize(
    ("size", "words"),
    [(97_000, ": 1/100."), (19_400_000, ": 2 times as much."), (9_700_000, ": as much."), (0, "9.7 MB.")],
)
def test_sizes(size: int, words: str, rows: list[VariantRow]) -> None:
    adam, basis = rows
    assert headlines([adam, replace(basis, optimizer_bytes=size)], JUDGING)[0].endswith(words)


def test_of_survivors_no_verdict_is_given(rows: list[VariantRow]) -> None:
    adam, basis = rows
    cut = replace(basis, paired_seeds=(0, 3, 4), missing_seeds=(1, 2), ci_low=0.001, ci_high=0.002)
    sentence = headlines([adam, cut], JUDGING)[0]
    assert sentence.startswith(
        "basis is not judged beside adam, since one or both have no run of seeds 1, 2: "
    )
    assert "on seeds 0, 3, 4 its AUC differs by" in sentence and "+0.00100 to +0.00200" in sentence
    assert "better" not in sentence and "loses less" not in sentence


def test_what_cannot_be_said_is_not_said(rows: list[VariantRow]) -> None:
    adam, basis = rows
    assert "nothing can be said" in headlines([basis], JUDGING)[0]
    alone = replace(basis, auc_difference=None, ci_low=None, ci_high=None, paired_seeds=())
    assert "shares no seed" in headlines([adam, alone], JUDGING)[0]
    assert "Caution: 4 seeds" in headlines([adam, replace(basis, seeds=(0, 1, 2, 3))], JUDGING)[-1]
