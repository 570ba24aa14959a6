"""Windows, thresholds and factors of mid-term rebalancing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recsys_basis.dense_optimizers.balanced_rebalancing import end_rebalancing, window_factor
from recsys_basis.dense_optimizers.balanced_signs import count_flips, sign_counters

WINDOW = 10


def rebalance(state: dict[str, Any], gradient: torch.Tensor, steps_done: int) -> torch.Tensor | None:
    factor = window_factor(state, gradient.dtype, steps_done, WINDOW, 5, 1.3, 0.7)
    count_flips(sign_counters(state, gradient), gradient)
    return factor


def run(flips_in_window: list[list[int]]) -> list[torch.Tensor | None]:
    """Factors of each step for one entry a column; the entry flips in the first steps of each window."""
    state: dict[str, Any] = {}
    sign = torch.ones(len(flips_in_window[0]))
    factors = []
    for window in flips_in_window:
        for place in range(WINDOW):
            sign = torch.where(torch.tensor(window) > place, -sign, sign)
            factors.append(rebalance(state, sign, len(factors)))
    end_rebalancing(state)
    assert state == {}
    return factors


def test_factor_goes_by_the_flips_of_the_window_before() -> None:
    """The first gradient of all has nothing to flip against, so the first window counts one less."""
    factors = run([[1, 2, 6, 7, 10], [0, 5, 6, 10, 0], [0, 0, 0, 0, 0]])
    assert factors[:WINDOW] == [None] * WINDOW
    for factor in factors[WINDOW : 2 * WINDOW]:  # 0, 1, 5, 6, 9 flips
        torch.testing.assert_close(factor, torch.tensor([1.3, 1.0, 1.0, 0.7, 0.7]))
    for factor in factors[2 * WINDOW :]:  # 0, 5, 6, 10, 0 flips
        torch.testing.assert_close(factor, torch.tensor([1.3, 1.0, 0.7, 0.7, 1.3]))


def test_factors_do_not_pile_up() -> None:
    factors = run([[0]] * 6)
    assert [factor.item() for factor in factors[WINDOW:]] == pytest.approx([1.3] * 50)


def test_a_parameter_that_joins_inside_a_window_waits_for_the_next() -> None:
    state: dict[str, Any] = {}
    for steps_done in range(5, 20):
        factor = rebalance(state, torch.ones(1), steps_done)
        assert (factor is None) == (steps_done < 10)
