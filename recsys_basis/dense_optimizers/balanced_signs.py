"""Sign flips of a gradient, counted for every entry: what masking and rebalancing both look at.

A flip is a gradient whose sign is opposite to that of the entry's last non-zero gradient. Two bytes an
entry, kept in the optimizer's state of the parameter while somebody counts: ``last_sign`` int8 and
``num_flips`` uint8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_COUNTED_STEPS = 255
"""Flips are counted in one byte, so over at most this many steps."""


def count_flips(state: dict[str, Any], gradient: Tensor) -> Tensor:
    """Enter ``gradient`` into the counters of ``state``; returns the flips so far, uint8, itself state."""
    sign = gradient.sign().to(torch.int8)
    if "num_flips" not in state:
        state["last_sign"] = sign
        state["num_flips"] = torch.zeros_like(sign, dtype=torch.uint8)
        return state["num_flips"]
    last_sign, num_flips = state["last_sign"], state["num_flips"]
    num_flips += last_sign * sign < 0
    torch.where(sign != 0, sign, last_sign, out=last_sign)
    return num_flips


def forget_flips(state: dict[str, Any]) -> None:
    """Free the counters."""
    for name in ("last_sign", "num_flips"):
        state.pop(name, None)
