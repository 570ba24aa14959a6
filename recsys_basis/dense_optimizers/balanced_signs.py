"""Sign flips of a gradient, counted for every entry: what masking and rebalancing both look at.

A flip is a gradient whose sign is opposite to that of the entry's last non-zero gradient. Two bytes an entry,
kept in the optimizer's state of the parameter while somebody counts: ``last_sign`` and ``num_flips``, int8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_COUNTED_STEPS = 127
"""Flips are counted in one byte, so over at most this many steps."""


class SignCounters(NamedTuple):
    """Of one parameter, in its shape, int8; both are its state."""

    last_sign: Tensor
    """Of the last non-zero gradient; 0 before the first."""
    num_flips: Tensor


def sign_counters(state: dict[str, Any], parameter: Tensor) -> SignCounters:
    """The counters in ``state``, put there if missing."""
    for name in SignCounters._fields:
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=torch.int8)
    return SignCounters(state["last_sign"], state["num_flips"])


def count_flips(counters: SignCounters, gradient: Tensor) -> None:
    """Enter ``gradient``.

    In arithmetic on small integers: comparisons and selections are many times slower on a CPU.
    """
    sign = gradient.sign().to(torch.int8)
    counters.num_flips.sub_((counters.last_sign * sign).clamp_(max=0))  # -1 where the signs differ
    counters.last_sign.add_(sign, alpha=2).clamp_(-1, 1)  # a zero leaves the last sign


def forget_flips(state: dict[str, Any]) -> None:
    """Free the counters."""
    for name in SignCounters._fields:
        state.pop(name, None)
