"""Is one variant's AUC better than another's? The paired difference with a 95 % interval.

Both variants are trained with the same S seeds and score the same n test rows, so their AUC
differences D_s vary for two reasons: which rows are in the test set, and which seed was drawn.
Two intervals answer for both.

``paired_auc_difference`` is the method of multi-reader ROC studies with seeds in the readers'
place and rows in the cases': Obuchowski and Rockette, Commun. Stat. Simul. 24 (1995), with the
degrees of freedom of Hillis, Stat. Med. 26 (2007), which are Welch and Satterthwaite's with the
rows' part taken as known:

    variance = rows + seeds
    rows  = mean covariance of D_s and D_s' over the pairs of different seeds
    seeds = sample variance of the D_s, over S
    degrees of freedom = variance^2 / (seeds^2 / (S - 1))

``rows`` leaves out the diagonal because ``seeds`` already holds the noise that a seed's own
scores add on these rows; adding the variance of the mean over seeds would count it twice. The
covariances are DeLong's (Biometrics 44, 1988), by the midranks of Sun and Xu (IEEE Signal
Processing Letters 21, 2014). With one seed only DeLong's variance is left, and the interval
speaks of these two trained models, not of the two rules. Simulated (tests/metrics/test_paired.py),
it covers about 95 % with five seeds; with two or three that differ much, 88 to 93 %.

``bootstrap_difference`` assumes less and costs more: it resamples seeds and rows together.
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

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class AucDifference:
    """AUC of a variant minus AUC of the baseline, mean over ``num_seeds`` seeds, and its 95 % interval."""

    difference: float
    ci_low: float
    ci_high: float
    num_seeds: int
    standard_error_rows: float
    """From the sampling of test rows."""
    standard_error_seeds: float | None
    """From the drawing of seeds; None with one seed: then the interval covers row sampling only."""


def paired_auc_difference(
    labels: NDArray[Any], logits: NDArray[Any], baseline_logits: NDArray[Any]
) -> AucDifference:
    """Compare two variants by the analytic interval of this file's docstring.

    labels [n], 0 or 1; logits and baseline_logits [S, n] float: row s of both comes from the same
    seed, column j of both is test row j. Raises what ``click_metrics`` raises, and ValueError with
    fewer than two rows of a label.
    """
    clicked, logits, baseline_logits = _check(labels, logits, baseline_logits)
    on_clicks, on_others = (
        of_variant - of_baseline
        for of_variant, of_baseline in zip(
            structural_components(clicked, logits),
            structural_components(clicked, baseline_logits),
            strict=True,
        )
    )
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
        num_seeds=num_seeds,
        standard_error_rows=math.sqrt(rows),
        standard_error_seeds=math.sqrt(seeds) if num_seeds > 1 else None,
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


def bootstrap_difference(
    labels: NDArray[Any],
    logits: NDArray[Any],
    baseline_logits: NDArray[Any],
    num_resamples: int,
    seed: int,
) -> tuple[float, float]:
    """95 % percentile interval of the same difference; arguments and errors as ``paired_auc_difference``.

    Each resample draws n rows and S seeds with replacement and takes the mean difference of the
    exact AUCs (the pigeonhole bootstrap: Owen, Annals of Applied Statistics 1, 2007; it errs to the
    wide side in what seeds and rows do jointly, to the narrow side by (S - 1) / S in what seeds do
    alone). A resample of one label only is drawn again. Cost: 2 S passes over n rows a resample.
    """
    clicked, logits, baseline_logits = _check(labels, logits, baseline_logits)
    random = np.random.default_rng(seed)
    num_seeds = len(logits)
    variant = [_SortedRows(clicked, scores) for scores in logits]
    baseline = [_SortedRows(clicked, scores) for scores in baseline_logits]
    differences = np.empty(num_resamples)
    for resample in range(num_resamples):
        counts = _draw_rows(random, clicked)
        drawn, times = np.unique(random.integers(num_seeds, size=num_seeds), return_counts=True)
        by_seed = [variant[index].auc(counts) - baseline[index].auc(counts) for index in drawn]
        differences[resample] = np.average(by_seed, weights=times)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(differences, [tail, 100 - tail])
    return float(low), float(high)


class _SortedRows:
    """Rows sorted by score once, so that a weighted AUC is one pass."""

    def __init__(self, clicked: NDArray[np.bool_], scores: FloatArray) -> None:
        self.order = np.argsort(scores)
        self.clicked = clicked[self.order]
        self.tie_starts = np.flatnonzero(np.diff(scores[self.order], prepend=-np.inf))

    def auc(self, counts: NDArray[np.int64]) -> float:
        """AUC with row j taken counts[j] times."""
        counts = counts[self.order]
        clicks = np.add.reduceat(counts * self.clicked, self.tie_starts)
        others = np.add.reduceat(counts, self.tie_starts) - clicks
        lower = np.cumsum(others) - others
        return float(clicks @ (lower + 0.5 * others) / (clicks.sum() * others.sum()))


def _draw_rows(random: np.random.Generator, clicked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[n] int64: how often each row is among n draws with replacement, rows of both labels among them."""
    num_rows = len(clicked)
    while True:
        counts = np.bincount(random.integers(num_rows, size=num_rows), minlength=num_rows)
        if 0 < counts[clicked].sum() < num_rows:
            return counts


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
