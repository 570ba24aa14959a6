"""Quality of click predictions on one set of rows: AUC, log loss, normalized entropy, calibration.

The input is logits, not probabilities: a float32 sigmoid is exactly 1 from a logit of about 17
on, which makes one confident mistake an infinite log loss (or one that depends on a clipping
constant) and merges different scores into ties of the AUC. From the logit z both are exact:
the log loss of a row is log(1 + e^z) - y z, and z sorts rows just as sigmoid(z) would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr, expit
from sklearn.metrics import roc_auc_score

from recsys_basis.errors import UserError


class OneClassError(UserError, ValueError):
    """Every evaluated row has the same label, so AUC and normalized entropy do not exist."""


@dataclass(frozen=True)
class ClickMetrics:
    """Quality over ``num_rows`` evaluated rows."""

    auc: float
    """Exact area under the ROC curve over all rows; ties count one half."""
    log_loss: float
    """Mean negative log likelihood of a row, in nats."""
    normalized_entropy: float
    """log_loss over the log loss of always predicting ``click_rate``; below 1 is better than that."""
    calibration: float
    """Mean predicted probability over ``click_rate``; 1 is calibrated, above 1 predicts too many clicks."""
    click_rate: float
    """Share of the evaluated rows whose label is 1."""
    num_rows: int


def click_metrics(labels: NDArray[Any], logits: NDArray[Any]) -> ClickMetrics:
    """Score ``logits`` [n] (float, natural log odds of a click) against ``labels`` [n] (0 or 1, any dtype).

    Everything is computed in float64. Normalized entropy is that of He et al., "Practical Lessons
    from Predicting Clicks on Ads at Facebook", ADKDD 2014, section 2; its background rate here is
    the click rate of the evaluated rows themselves, not of the training rows.

    Raises ValueError for no rows, lengths that differ, labels other than 0 and 1, logits that are
    not finite; OneClassError for labels that are all 0 or all 1.
    """
    clicked = clicked_rows(labels)
    scores = finite_logits(logits, clicked.shape)
    click_rate = float(clicked.mean())
    log_loss = float(np.mean(np.logaddexp(0.0, scores) - clicked * scores))
    return ClickMetrics(
        auc=float(roc_auc_score(clicked, scores)),
        log_loss=log_loss,
        normalized_entropy=log_loss / float(entr(click_rate) + entr(1.0 - click_rate)),
        calibration=float(expit(scores).mean()) / click_rate,
        click_rate=click_rate,
        num_rows=len(clicked),
    )


def clicked_rows(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """``labels`` [n] as bool [n]. Raises what ``click_metrics`` raises for labels."""
    if labels.ndim != 1 or labels.size == 0:
        raise ValueError(f"labels have shape {labels.shape}: expected [n] with at least one row to evaluate")
    clicked: NDArray[np.bool_] = labels == 1
    odd = np.flatnonzero(~clicked & (labels != 0))
    if odd.size:
        raise ValueError(f"label of row {odd[0]} is {labels[odd[0]]}: labels must be 0 or 1")
    if clicked.all() or not clicked.any():
        raise OneClassError(
            f"all {labels.size} evaluated rows have label {int(clicked[0])}: AUC needs rows of both labels, "
            "evaluate on a larger or different part of the data"
        )
    return clicked


def finite_logits(logits: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """``logits`` as float64, refused unless finite and of ``shape`` (rows last)."""
    if logits.shape != shape:
        raise ValueError(f"logits have shape {logits.shape}, the labels call for {shape}")
    scores = logits.astype(np.float64)
    odd = np.argwhere(~np.isfinite(scores))
    if odd.size:
        first = tuple(odd[0])
        raise ValueError(
            f"{len(odd)} of {scores.size} logits are not finite, first {scores[first]} in row {first[-1]}"
        )
    return scores
