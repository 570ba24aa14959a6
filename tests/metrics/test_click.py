"""Click metrics against counted pairs, scikit-learn and formulas written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import log_loss as sklearn_log_loss

from recsys_basis.metrics.click import OneClassError, click_metrics


def _clicks(num_rows: int = 500, decimals: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Labels and rounded, hence tied, logits."""
    random = np.random.default_rng(7)
    labels = (random.random(num_rows) < 0.3).astype(np.float32)
    logits = np.round(random.normal(labels - 1.0, 1.0), decimals).astype(np.float32)
    return labels, logits


def test_auc_is_the_share_of_ordered_pairs_with_ties_as_half() -> None:
    labels, logits = _clicks()
    clicks, others = logits[labels == 1][:, None], logits[labels == 0][None, :]
    counted = ((clicks > others) + 0.5 * (clicks == others)).mean()
    assert (clicks == others).any()
    assert click_metrics(labels, logits).auc == pytest.approx(counted, abs=1e-12)


def test_log_loss_entropy_and_calibration() -> None:
    labels, logits = _clicks()
    probabilities = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    rate = float(labels.sum()) / len(labels)
    loss = sklearn_log_loss(labels, probabilities)
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    metrics = click_metrics(labels, logits)
    assert metrics.log_loss == pytest.approx(loss, rel=1e-12)
    assert metrics.normalized_entropy == pytest.approx(loss / entropy, rel=1e-12)
    assert metrics.calibration == pytest.approx(probabilities.mean() / rate, rel=1e-12)
    assert metrics.click_rate == pytest.approx(rate)
    assert metrics.num_rows == 500


def test_predicting_the_click_rate_is_the_yardstick() -> None:
    labels = np.array([1, 0, 0, 0])
    metrics = click_metrics(labels, np.full(4, math.log(0.25 / 0.75)))
    assert metrics.auc == 0.5
    assert metrics.normalized_entropy == pytest.approx(1.0)
    assert metrics.calibration == pytest.approx(1.0)


def test_logits_beyond_a_float32_sigmoid_stay_exact() -> None:
    labels = np.array([0, 1, 0, 1], np.float32)
    logits = np.array([40.0, 41.0, -200.0, -300.0], np.float32)
    metrics = click_metrics(labels, logits)
    assert metrics.log_loss == pytest.approx((40.0 + 0.0 + 0.0 + 300.0) / 4, rel=1e-12)
    assert metrics.auc == 0.5  # 41 beats both others, -300 neither: sigmoid would tie 40 with 41


def test_neighbouring_float32_logits_are_not_tied() -> None:
    low = np.float32(3.0)
    logits = np.array([low, np.nextafter(low, np.float32(4.0))])
    assert click_metrics(np.array([0, 1]), logits).auc == 1.0


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float64, np.bool_])
def test_labels_of_any_dtype(dtype: type) -> None:
    labels, logits = _clicks()
    assert click_metrics(labels.astype(dtype), logits) == click_metrics(labels, logits)


@pytest.mark.parametrize(
    ("labels", "logits", "message"),
    [
        ([], [], "at least one row"),
        ([[0, 1]], [[0.0, 1.0]], r"shape \(1, 2\)"),
        ([0, 1], [0.5], r"shape \(1,\), the labels call for \(2,\)"),
        ([0, 1, 2], [0.1, 0.2, 0.3], "label of row 2 is 2"),
        ([0, 1, math.nan], [0.1, 0.2, 0.3], "label of row 2 is nan"),
        ([0, 1, 1], [0.1, math.nan, math.inf], "2 of 3 logits are not finite, first nan in row 1"),
    ],
)
def test_refuses(labels: list[float], logits: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        click_metrics(np.array(labels), np.array(logits))


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_is_an_error_of_its_own(label: int) -> None:
    with pytest.raises(OneClassError, match=f"all 3 evaluated rows have label {label}"):
        click_metrics(np.full(3, label), np.array([0.1, 0.2, 0.3]))
