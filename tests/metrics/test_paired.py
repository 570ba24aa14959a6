"""Paired AUC differences against pair counting, scikit-learn, published formulas, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm, t
from sklearn.metrics import roc_auc_score

from recsys_basis.metrics.click import OneClassError
from recsys_basis.metrics.paired import (
    AucDifference,
    PairedComponents,
    bootstrap_interval,
    delong_interval,
    resampled_differences,
    structural_components,
)


def paired(labels: np.ndarray, logits: np.ndarray, baseline: np.ndarray) -> AucDifference:
    return delong_interval(PairedComponents.of(labels, logits, baseline))


def bootstrap(
    labels: np.ndarray, logits: np.ndarray, baseline: np.ndarray, num_resamples: int, seed: int
) -> tuple[float, float]:
    return bootstrap_interval(PairedComponents.of(labels, logits, baseline), num_resamples, seed)


class Trials:
    """Draws labels [n], and logits [S, n] of two variants, from a model whose expected AUCs are known.

    Clicks lie ``strength`` higher than other rows. Every row has a part that all runs share, one that
    a variant's runs share (``of_variant``), and one of each run alone (``of_run``), together of variance
    1. Each run's strength has its own deviation ``of_seed``, so its AUC is Phi(strength / sqrt(2)) in
    expectation over rows, and Phi(mean strength / sqrt(2 + of_seed^2)) over seeds, too.
    """

    strengths = np.array([1.1, 1.0])

    def __init__(
        self, num_seeds: int, num_rows: int, of_seed: float, of_variant: float, of_run: float, seed: int = 0
    ) -> None:
        self.num_seeds, self.num_rows = num_seeds, num_rows
        self.of_seed, self.of_variant, self.of_run = of_seed, of_variant, of_run
        self.random = np.random.default_rng(seed)
        better, worse = norm.cdf(self.strengths / math.sqrt(2 + of_seed**2))
        self.difference = better - worse

    def draw(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        normal, seeds, rows = self.random.standard_normal, self.num_seeds, self.num_rows
        labels = (np.arange(rows) < rows // 4).astype(np.int8)
        strength = self.strengths[:, None] + self.of_seed * normal((2, seeds))
        shared = math.sqrt(1 - self.of_variant**2 - self.of_run**2)
        noise = (
            shared * normal(rows)
            + self.of_variant * normal((2, 1, rows))
            + self.of_run * normal((2, seeds, rows))
        )
        first, second = strength[:, :, None] * labels + noise
        return labels, first, second


def _tied(seed: int, num_seeds: int, num_rows: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A small draw with many equal scores."""
    labels, first, second = Trials(num_seeds, num_rows, 0.1, 0.3, 0.3, seed).draw()
    return labels, np.round(first, 1), np.round(second, 1)


def _delong_covariance(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """DeLong's covariance matrix of the AUCs of ``logits`` [M, n], by comparing all pairs of rows."""
    clicks, others = logits[:, labels == 1, None], logits[:, None, labels == 0]
    wins = (clicks > others) + 0.5 * (clicks == others)  # [M, m, n - m]
    deviations = wins - wins.mean(axis=(1, 2), keepdims=True)
    covariance = np.zeros((len(logits), len(logits)))
    for own in (deviations.mean(axis=2), deviations.mean(axis=1)):
        covariance = covariance + own @ own.T / (own.shape[1] - 1) / own.shape[1]
    return covariance


@pytest.mark.parametrize("seed", range(3))
def test_components_average_to_the_auc(seed: int) -> None:
    labels, logits, _ = _tied(seed, num_seeds=3)
    on_clicks, on_others = structural_components(labels == 1, logits)
    for index in range(3):
        auc = roc_auc_score(labels, logits[index])
        assert on_clicks[index].mean() == pytest.approx(auc, abs=1e-12)
        assert on_others[index].mean() == pytest.approx(auc, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_one_seed_is_delongs_interval(seed: int) -> None:
    labels, logits, baseline = _tied(seed, num_seeds=1)
    covariance = _delong_covariance(labels, np.concatenate([logits, baseline]))
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    found = paired(labels, logits, baseline)
    assert found.difference == pytest.approx(
        roc_auc_score(labels, logits[0]) - roc_auc_score(labels, baseline[0])
    )
    assert found.standard_error_rows == pytest.approx(math.sqrt(variance), rel=1e-10)
    assert found.standard_error_seeds is None
    assert found.seed_standard_errors == pytest.approx([math.sqrt(variance)], rel=1e-10)
    assert found.ci_high - found.difference == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-6)
    assert found.difference - found.ci_low == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-6)


@pytest.mark.parametrize(("seed", "num_seeds"), [(0, 2), (1, 3), (2, 5), (3, 5)])
def test_several_seeds_are_obuchowski_rockettes_interval(seed: int, num_seeds: int) -> None:
    """Their formulas as published, in AUCs and covariances of single runs; Hillis's degrees of freedom."""
    labels, logits, baseline = _tied(seed, num_seeds)
    runs = np.concatenate([logits, baseline])
    covariance = _delong_covariance(labels, runs)
    aucs = np.array([roc_auc_score(labels, scores) for scores in runs]).reshape(2, num_seeds)
    interaction = aucs - aucs.mean(axis=0) - aucs.mean(axis=1, keepdims=True) + aucs.mean()
    mean_square = (interaction**2).sum() / (num_seeds - 1)
    blocks = covariance.reshape(2, num_seeds, 2, num_seeds)
    other_seed = ~np.eye(num_seeds, dtype=bool)
    same_variant = np.mean([blocks[0, :, 0][other_seed], blocks[1, :, 1][other_seed]])  # Cov2
    other_variant = blocks[0, :, 1][other_seed].mean()  # Cov3
    rows = num_seeds * max(same_variant - other_variant, 0.0)
    freedom = (mean_square + rows) ** 2 / (mean_square**2 / (num_seeds - 1))
    half_width = t.ppf(0.975, freedom) * math.sqrt(2 / num_seeds * (mean_square + rows))

    found = paired(labels, logits, baseline)
    assert found.difference == pytest.approx(aucs[0].mean() - aucs[1].mean(), abs=1e-12)
    assert found.by_seed == pytest.approx(aucs[0] - aucs[1], abs=1e-12)
    own = np.diagonal(blocks, axis1=1, axis2=3)  # [2, 2, S]: of the two runs of one seed
    variances = [own[0, 0, s] + own[1, 1, s] - 2 * own[0, 1, s] for s in range(num_seeds)]
    assert found.seed_standard_errors == pytest.approx(np.sqrt(variances), rel=1e-9)
    assert found.ci_high - found.difference == pytest.approx(half_width, rel=1e-9)
    assert found.difference - found.ci_low == pytest.approx(half_width, rel=1e-9)
    assert found.standard_error_rows == pytest.approx(math.sqrt(2 / num_seeds * rows), abs=1e-12)
    assert found.standard_error_seeds == pytest.approx(math.sqrt(2 / num_seeds * mean_square), abs=1e-12)


def test_rows_part_agrees_with_resampling_the_rows() -> None:
    labels, logits, baseline = Trials(1, 600, 0.0, 0.4, 0.0).draw()
    random = np.random.default_rng(1)
    resampled = []
    for _ in range(400):
        rows = random.integers(600, size=600)
        resampled.append(
            roc_auc_score(labels[rows], logits[0, rows]) - roc_auc_score(labels[rows], baseline[0, rows])
        )
    found = paired(labels, logits, baseline)
    assert found.standard_error_rows == pytest.approx(np.std(resampled), rel=0.12)


@pytest.mark.parametrize(
    ("num_seeds", "of_seed", "of_variant", "of_run"),
    [
        pytest.param(1, 0.0, 0.4, 0.0, id="one-seed-rows-only"),
        pytest.param(5, 0.0, 0.4, 0.05, id="rows"),
        pytest.param(5, 0.2, 0.1, 0.05, id="seeds"),
        pytest.param(5, 0.05, 0.3, 0.2, id="rows-and-seeds"),
        pytest.param(5, 0.0, 0.2, 0.4, id="each-runs-own-noise"),
    ],
)
def test_the_interval_covers_the_true_difference_95_times_of_100(
    num_seeds: int, of_seed: float, of_variant: float, of_run: float
) -> None:
    trials = Trials(num_seeds, 400, of_seed, of_variant, of_run)
    covered = [
        found.ci_low <= trials.difference <= found.ci_high
        for found in (paired(*trials.draw()) for _ in range(500))
    ]
    assert 0.925 <= np.mean(covered) <= 0.98


@pytest.mark.parametrize("num_seeds", [2, 3])
def test_few_seeds_that_differ_much_are_covered_less(num_seeds: int) -> None:
    """What the docstring of paired.py warns of."""
    trials = Trials(num_seeds, 400, 0.2, 0.1, 0.05)
    covered = [
        found.ci_low <= trials.difference <= found.ci_high
        for found in (paired(*trials.draw()) for _ in range(500))
    ]
    assert 0.85 <= np.mean(covered) <= 0.94


def test_equal_variants_differ_by_nothing() -> None:
    labels, logits, _ = _tied(0, num_seeds=3)
    found = paired(labels, logits, logits)
    assert (found.difference, found.ci_low, found.ci_high) == (0.0, 0.0, 0.0)
    assert bootstrap(labels, logits, logits, num_resamples=20, seed=0) == (0.0, 0.0)


def test_swapping_the_variants_flips_the_sign() -> None:
    labels, logits, baseline = _tied(0, num_seeds=3)
    found = paired(labels, logits, baseline)
    flipped = paired(labels, baseline, logits)
    assert flipped.difference == pytest.approx(-found.difference, abs=1e-15)
    assert flipped.ci_low == pytest.approx(-found.ci_high, abs=1e-15)
    assert flipped.ci_high == pytest.approx(-found.ci_low, abs=1e-15)
    low, high = bootstrap(labels, logits, baseline, num_resamples=200, seed=4)
    flipped_low, flipped_high = bootstrap(labels, baseline, logits, num_resamples=200, seed=4)
    assert (flipped_low, flipped_high) == pytest.approx((-high, -low), abs=1e-12)


def reranked(counts: np.ndarray, labels: np.ndarray, logits: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """[R, S]: what ``resampled_differences`` estimates, by comparing all pairs of rows of each resample."""
    clicks, others = counts[:, labels == 1].astype(float), counts[:, labels == 0].astype(float)

    def aucs(scores: np.ndarray) -> np.ndarray:
        wins = np.sign(scores[labels == 1, None] - scores[None, labels == 0]) / 2 + 0.5
        return ((clicks @ wins) * others).sum(axis=1) / clicks.sum(axis=1) / others.sum(axis=1)

    return np.stack([aucs(own) - aucs(other) for own, other in zip(logits, baseline, strict=True)], axis=1)


def test_resampled_differences_are_those_of_re_ranked_resamples() -> None:
    labels, logits, baseline = Trials(2, 3000, 0.1, 0.4, 0.3).draw()
    random = np.random.default_rng(3)
    counts = np.stack([np.bincount(random.integers(3000, size=3000), minlength=3000) for _ in range(60)])
    found = resampled_differences(PairedComponents.of(labels, logits, baseline), counts.astype(float))
    expected = reranked(counts, labels, logits, baseline)
    spread = expected.std(axis=0)
    assert (np.sqrt(np.square(found - expected).mean(axis=0)) < 0.08 * spread).all()
    np.testing.assert_allclose(found.std(axis=0), spread, rtol=0.02)
    thrice = np.full((1, 3000), 3.0)
    found = resampled_differences(PairedComponents.of(labels, logits, baseline), thrice)
    np.testing.assert_allclose(found, reranked(thrice, labels, logits, baseline), atol=1e-12)


def test_the_bootstrap_is_that_of_re_ranked_resamples() -> None:
    labels, logits, baseline = Trials(4, 500, 0.1, 0.4, 0.2).draw()
    random = np.random.default_rng(7)
    counts = np.stack([np.bincount(random.integers(500, size=500), minlength=500) for _ in range(800)])
    seeds = random.integers(4, size=(800, 3))  # one seed less than there are
    differences = np.take_along_axis(reranked(counts, labels, logits, baseline), seeds, axis=1).mean(axis=1)
    low, high = bootstrap(labels, logits, baseline, num_resamples=4000, seed=0)
    assert (low, high) == pytest.approx(np.percentile(differences, [2.5, 97.5]), abs=0.1 * (high - low))
    assert high - low == pytest.approx(np.subtract(*np.percentile(differences, [97.5, 2.5])), rel=0.08)


@pytest.mark.parametrize(("of_seed", "of_variant"), [(0.0, 0.4), (0.3, 0.05), (0.1, 0.4)])
def test_bootstrap_is_as_wide_as_rows_and_seeds_make_it(of_seed: float, of_variant: float) -> None:
    labels, logits, baseline = Trials(8, 600, of_seed, of_variant, 0.0).draw()
    analytic = paired(labels, logits, baseline)
    assert analytic.standard_error_seeds is not None
    expected = 2 * 1.96 * math.hypot(analytic.standard_error_rows, analytic.standard_error_seeds)
    low, high = bootstrap(labels, logits, baseline, num_resamples=2000, seed=2)
    assert high - low == pytest.approx(expected, rel=0.08)
    assert low < analytic.difference < high


@pytest.mark.parametrize(
    ("num_seeds", "of_seed", "of_variant", "of_run", "least", "most"),
    [
        pytest.param(5, 0.2, 0.1, 0.05, 0.79, 0.9, id="seeds"),
        pytest.param(15, 0.2, 0.1, 0.05, 0.89, 0.97, id="many-seeds"),
        pytest.param(5, 0.0, 0.2, 0.4, 0.97, 1.0, id="each-runs-own-noise"),
    ],
)
def test_what_the_bootstrap_covers(
    num_seeds: int, of_seed: float, of_variant: float, of_run: float, least: float, most: float
) -> None:
    """What the docstring of paired.py says of it, the cases where it is too narrow or too wide included."""
    trials = Trials(num_seeds, 400, of_seed, of_variant, of_run)
    intervals = [bootstrap(*trials.draw(), num_resamples=150, seed=number) for number in range(250)]
    covered = np.mean([low <= trials.difference <= high for low, high in intervals])
    assert least <= covered <= most


def test_a_resample_draws_one_seed_less_than_there_are() -> None:
    """Of four seeds one differs, by d: of three draws two or more are that one in 16 % of resamples,
    three in 1.6 %, so the upper end is 2/3 d; of four draws it would be 3/4 d."""
    random = np.random.default_rng(0)
    labels = (np.arange(4000) % 4 == 0).astype(np.int8)
    baseline = random.standard_normal((4, 4000))
    variant = baseline.copy()
    variant[0] += 3 * labels
    (difference, *others) = paired(labels, variant, baseline).by_seed
    assert difference > 0.4 and others == [0.0, 0.0, 0.0]
    low, high = bootstrap(labels, variant, baseline, num_resamples=1000, seed=0)
    assert low == 0.0
    assert high == pytest.approx(2 / 3 * difference, rel=0.05)


def test_bootstrap_repeats_with_its_seed() -> None:
    rows = _tied(0, num_seeds=2)
    assert bootstrap(*rows, 30, seed=1) == bootstrap(*rows, 30, seed=1)
    assert bootstrap(*rows, 30, seed=1) != bootstrap(*rows, 30, seed=2)


def test_bootstrap_survives_resamples_of_one_label() -> None:
    labels = np.array([1, 1, 0, 0])
    scores = np.array([[0.4, 0.1, 0.2, 0.3]])
    low, high = bootstrap(labels, scores, -scores, num_resamples=200, seed=0)
    assert -1.0 <= low < high <= 1.0


def test_refuses() -> None:
    method = PairedComponents.of
    labels, scores = np.array([0, 0, 1, 1]), np.array([[0.1, 0.2, 0.3, 0.4]])
    with pytest.raises(OneClassError, match="all 4 evaluated rows have label 0"):
        method(np.zeros(4), scores, scores)
    with pytest.raises(ValueError, match="at least two rows of each label"):
        method(np.array([0, 0, 0, 1]), scores, scores)
    with pytest.raises(ValueError, match=r"shape \(4,\): expected \[S, n\]"):
        method(labels, scores[0], scores[0])
    with pytest.raises(ValueError, match=r"shape \(2, 4\), the labels call for \(1, 4\)"):
        method(labels, scores, np.repeat(scores, 2, axis=0))
    with pytest.raises(ValueError, match="first nan in row 3"):
        method(labels, scores, np.array([[0.1, 0.2, 0.3, math.nan]]))
