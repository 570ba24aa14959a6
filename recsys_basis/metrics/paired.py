"""Is one variant's AUC better than another's? The paired difference with two 95 % intervals.

Both variants are trained with the same S seeds and score the same n test rows, so their AUC
differences D_s vary for two reasons: which rows are in the test set, and which seed was drawn.
Both intervals answer for both, and both start from DeLong's components (Biometrics 44, 1988), by the
midranks of Sun and Xu (IEEE Signal Processing Letters 21, 2014): what each test row adds to each D_s.
Of one seed, the covariance of the components is DeLong's variance of the difference of two
correlated AUCs (``seed_standard_errors``).

``delong_interval`` combines the seeds by the method of multi-reader ROC studies with seeds in the
readers' place and rows in the cases': Obuchowski and Rockette, Commun. Stat. Simul. 24 (1995), with
the degrees of freedom of Hillis, Stat. Med. 26 (2007), which are Welch and Satterthwaite's with the
rows' part taken as known:

    variance = rows + seeds
    rows  = mean covariance of D_s and D_s' over the pairs of different seeds
    seeds = sample variance of the D_s, over S
    degrees of freedom = variance^2 / (seeds^2 / (S - 1))

``rows`` leaves out the diagonal because ``seeds`` already holds the noise that a seed's own
scores add on these rows; adding the variance of the mean over seeds would count it twice.

``bootstrap_interval`` assumes no distribution: it resamples rows and seeds together, and takes
percentiles. It draws n rows, and S - 1 of the S seeds (Rao and Wu, JASA 83, 1988, section 2: as many
make the variance of the mean over seeds unbiased, S would leave (S - 1) / S of it), each with
replacement, crosswise (the pigeonhole bootstrap: Owen, Annals of Applied Statistics 1, 2007, which
errs to the wide side in what seeds and rows do jointly). A resample's AUC is not ranked anew: it is
the mean of the components of its clicked rows plus that of its other rows, less the AUC. What this
leaves out is a 1/n-th of the variance (the AUC is a U-statistic: van der Vaart, Asymptotic Statistics,
1998, theorem 12.6); the tests hold it to the AUCs of re-ranked resamples.

With one seed both intervals allow for rows only, and speak of these two trained models, not of the
two rules. Simulated (tests/metrics/test_paired.py): with five seeds DeLong's covers about 95 %, with two or
three that differ much 88 to 93 %. The bootstrap covers 94 % where rows are most of the noise; 83 % where
five seeds are, and 92 % with 15, since percentiles know nothing of Student's t; and 99 % where each run's
own noise is, which the crosswise draw counts up to three times: there it is up to 1.7 times too wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, t

from recsys_basis.metrics.click import clicked_rows, finite_logits

CONFIDENCE = 0.95
RESAMPLES_AT_ONCE = 20
"""Rows' counts of so many resamples lie in memory together: 8 bytes a test row for each."""

FloatArray = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class AucDifference:
    """AUC of a variant minus AUC of the baseline, mean over seeds, and DeLong's 95 % interval."""

    difference: float
    ci_low: float
    ci_high: float
    standard_error_rows: float
    """From the sampling of test rows."""
    standard_error_seeds: float | None
    """From the drawing of seeds; None with one seed: then the interval covers row sampling only."""
    by_seed: tuple[float, ...]
    """The difference of each of the S seeds."""
    seed_standard_errors: tuple[float, ...]
    """DeLong's standard error of each: of these two trained models, over the sampling of test rows."""


@dataclass(frozen=True)
class PairedComponents:
    """What each test row adds to the AUC difference of each seed: on_clicks [S, m], on_others [S, n - m].

    The mean of each row of either is that seed's difference.
    """

    clicked: NDArray[np.bool_]
    """[n]."""
    on_clicks: FloatArray
    on_others: FloatArray

    @classmethod
    def of(
        cls, labels: NDArray[Any], logits: NDArray[Any], baseline_logits: NDArray[Any]
    ) -> PairedComponents:
        """Of a variant and its baseline.

        labels [n], 0 or 1; logits and baseline_logits [S, n] float: row s of both comes from the same
        seed, column j of both is test row j. Raises what ``click_metrics`` raises, and ValueError with
        fewer than two rows of a label.
        """
        clicked, logits, baseline_logits = _check(labels, logits, baseline_logits)
        of_variant = structural_components(clicked, logits)
        of_baseline = structural_components(clicked, baseline_logits)
        return cls(clicked, of_variant[0] - of_baseline[0], of_variant[1] - of_baseline[1])


def delong_interval(components: PairedComponents) -> AucDifference:
    """The analytic interval of this file's docstring."""
    on_clicks, on_others = components.on_clicks, components.on_others
    differences = on_clicks.mean(axis=1)  # [S]
    covariance = _covariance_of_means(on_clicks) + _covariance_of_means(on_others)  # [S, S]
    num_seeds = len(differences)
    if num_seeds == 1:
        rows, seeds, freedom = float(covariance[0, 0]), 0.0, math.inf
    else:
        between_seeds = covariance.sum() - covariance.trace()
        rows = max(0.0, float(between_seeds) / (num_seeds * (num_seeds - 1)))
        seeds = float(differences.var(ddof=1)) / num_seeds
        freedom = (rows + seeds) ** 2 / (seeds**2 / (num_seeds - 1)) if seeds > 0.0 else math.inf
    difference = float(differences.mean())
    half_width = float(t.ppf(0.5 + CONFIDENCE / 2, freedom)) * math.sqrt(rows + seeds)
    return AucDifference(
        difference=difference,
        ci_low=difference - half_width,
        ci_high=difference + half_width,
        standard_error_rows=math.sqrt(rows),
        standard_error_seeds=math.sqrt(seeds) if num_seeds > 1 else None,
        by_seed=tuple(differences.tolist()),
        seed_standard_errors=tuple(np.sqrt(covariance.diagonal()).tolist()),
    )


def bootstrap_interval(components: PairedComponents, num_resamples: int, seed: int) -> Interval:
    """The resampled interval of this file's docstring; a resample of one label only is drawn again."""
    random = np.random.default_rng(seed)
    num_seeds = len(components.on_clicks)
    drawn_seeds = max(1, num_seeds - 1)
    means = np.empty(num_resamples)
    for start in range(0, num_resamples, RESAMPLES_AT_ONCE):
        size = min(RESAMPLES_AT_ONCE, num_resamples - start)
        counts = np.stack([_draw_rows(random, components.clicked) for _ in range(size)])
        times = random.multinomial(drawn_seeds, np.full(num_seeds, 1 / num_seeds), size) / drawn_seeds
        differences = resampled_differences(components, counts)
        means[start : start + size] = (times * differences).sum(axis=1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def resampled_differences(components: PairedComponents, counts: FloatArray) -> FloatArray:
    """[R, S]: each seed's difference with row j taken counts[r, j] times; counts [R, n]."""
    clicks, others = counts[:, components.clicked], counts[:, ~components.clicked]
    return (
        clicks @ components.on_clicks.T / clicks.sum(axis=1, keepdims=True)
        + others @ components.on_others.T / others.sum(axis=1, keepdims=True)
        - components.on_clicks.mean(axis=1)
    )


def structural_components(clicked: NDArray[np.bool_], logits: FloatArray) -> tuple[FloatArray, FloatArray]:
    """DeLong's components of the AUCs of ``logits`` [S, n] for rows ``clicked`` [n]: ([S, m], [S, n - m]).

    For each of the m clicked rows the share of the other rows that score lower, for each other row
    the share of clicked rows that score higher; ties count one half. Each one's mean is the AUC.
    By Sun and Xu (2014): a row's midrank among all less its midrank within its label counts the others.
    """
    ranks = rankdata(logits, axis=1)
    clicks, others = logits[:, clicked], logits[:, ~clicked]
    on_clicks = (ranks[:, clicked] - rankdata(clicks, axis=1)) / others.shape[1]
    on_others = 1.0 - (ranks[:, ~clicked] - rankdata(others, axis=1)) / clicks.shape[1]
    return on_clicks, on_others


def _draw_rows(random: np.random.Generator, clicked: NDArray[np.bool_]) -> FloatArray:
    """[n]: how often each row is among n draws with replacement, rows of both labels among them."""
    num_rows = len(clicked)
    while True:
        counts = np.bincount(random.integers(num_rows, size=num_rows), minlength=num_rows)
        if 0 < counts[clicked].sum() < num_rows:
            return counts.astype(np.float64)


def _covariance_of_means(values: FloatArray) -> FloatArray:
    """[S, S]: covariance of the S row means of ``values`` [S, m], its columns being independent draws."""
    covariance: FloatArray = np.atleast_2d(np.cov(values)) / values.shape[1]
    return covariance


def _check(
    labels: NDArray[Any], logits: NDArray[Any], baseline_logits: NDArray[Any]
) -> tuple[NDArray[np.bool_], FloatArray, FloatArray]:
    clicked = clicked_rows(labels)
    if min(clicked.sum(), (~clicked).sum()) < 2:
        raise ValueError("an interval needs at least two rows of each label")
    if logits.ndim != 2 or len(logits) == 0:
        raise ValueError(f"logits have shape {logits.shape}: expected [S, n] with at least one seed")
    shape = (len(logits), len(clicked))
    return clicked, finite_logits(logits, shape), finite_logits(baseline_logits, shape)
