"""The last line of every rule: change the weights of the touched rows."""

from __future__ import annotations

import torch


def change_rows(weights: torch.Tensor, change: torch.Tensor, decay: float) -> None:
    """weights <- weights - change - decay * weights, in place; both [U, D] float32."""
    if decay > 0:
        weights.mul_(1 - decay)
    weights.sub_(change)
