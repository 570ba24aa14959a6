"""Jitter against pandas' rolling standard deviation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from recsys_basis.metrics.jitter import loss_jitter


def test_jitter_is_the_mean_rolling_deviation() -> None:
    losses = np.random.default_rng(0).normal(size=57)
    expected = pd.Series(losses).rolling(10).std().mean()
    assert loss_jitter(losses.tolist()) == pytest.approx(expected, rel=1e-12)


def test_a_steady_trend_has_only_its_own_slope() -> None:
    steady = [1.0 - 0.01 * step for step in range(50)]
    assert loss_jitter(steady) == pytest.approx(0.01 * np.arange(10).std(ddof=1))


def test_fewer_steps_than_a_window_have_none() -> None:
    assert loss_jitter([0.5] * 9) is None and loss_jitter([0.5] * 10) == 0.0
