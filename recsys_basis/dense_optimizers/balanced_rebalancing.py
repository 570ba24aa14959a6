"""Balanced Adam's mid-term rebalancing: V by how steady the sign of the gradient is.

Steps are cut into windows (of 10). The flips of an entry in one window (``balanced_signs.py``) decide how
its V is read in the next:

    no flip, the same sign for a whole window  V x 1.3   the step is 1 / sqrt(1.3) = 0.88 of Adam's
    more than 5 flips                          V x 0.7   the step is 1 / sqrt(0.7) = 1.20 of Adam's
    between                                    V

Mind the direction. V stands under the step, so the factors hold back entries that agree with themselves,
which Adam moves by nearly eta each step, and push those that contradict themselves, which Adam hardly
moves. Swap the factors for the opposite. They apply to the V that is read and do not pile up from window to
window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys_basis.dense_optimizers.balanced_signs import forget_flips


def window_factor(
    state: dict[str, Any],
    dtype: torch.dtype,
    steps_done: int,
    window: int,
    most_flips: int,
    steady_factor: float,
    flipping_factor: float,
) -> Tensor | None:
    """Factor on V, of the gradient's shape; None in the first window, which has none before it to go by.

    steps_done: steps of the rebalancing phase before this one. Call once a step, before the gradient's flips
    are counted in ``state``, which also keeps the factor of the last whole window. A parameter without a
    gradient in the step that opens a window goes on with the window before it.
    """
    if steps_done % window == 0 and "num_flips" in state:
        flips = state["num_flips"]
        steady = (1 - flips).clamp_(min=0).to(dtype)
        flipping = (flips - most_flips).clamp_(0, 1).to(dtype)
        factor = steady.mul_(steady_factor - 1.0).add_(flipping, alpha=flipping_factor - 1.0).add_(1.0)
        state["window_factor"] = factor  # in arithmetic, as count_flips
        flips.zero_()
    return state.get("window_factor")


def end_rebalancing(state: dict[str, Any]) -> None:
    """Free what the phase kept."""
    forget_flips(state)
    state.pop("window_factor", None)
