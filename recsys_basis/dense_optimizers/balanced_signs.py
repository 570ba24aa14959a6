"""Sign flips of a gradient, counted for every entry: what masking and rebalancing both look at.

A flip is a gradient whose sign is opposite to that of the entry's last non-zero gradient. Two bytes an entry,
kept in the optimizer's state of the parameter while somebody counts: ``last_sign`` and ``num_flips``, int8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_COUNTED_STEPS = 127
"""Flips are counted in one byte, so over at most this many steps."""


def count_flips(state: dict[str, Any], gradient: Tensor) -> Tensor:
    """Enter ``gradient`` into the counters of ``state``; returns the flips so far, int8, itself state.

    In arithmetic on small integers: comparisons and selections are many times slower on a CPU.
    """
    sign = gradient.sign().to(torch.int8)
    if "num_flips" not in state:
        state["last_sign"] = sign
        state["num_flips"] = torch.zeros_like(sign)
        return state["num_flips"]
    last_sign, num_flips = state["last_sign"], state["num_flips"]
    num_flips -= (last_sign * sign).clamp_(max=0)  # -1 where the signs differ
    last_sign.add_(sign, alpha=2).clamp_(-1, 1)  # a zero leaves the last sign
    return num_flips


def forget_flips(state: dict[str, Any]) -> None:
    """Free the counters."""
    for name in ("last_sign", "num_flips"):
        state.pop(name, None)
