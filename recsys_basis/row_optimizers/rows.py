"""The last line of every rule: change the weights of the touched rows, and of no others."""

from __future__ import annotations

import torch


def change_rows(weights: torch.Tensor, rows: torch.Tensor, change: torch.Tensor, decay: float) -> None:
    """weights[rows] <- weights[rows] - change - decay * weights[rows], in place.

    weights [R, D]; rows [U] int64, distinct; change [U, D]. A gather and a scatter of whole rows are
    several times faster on a CPU than ``weights[rows] -= change`` or a two-dimensional ``index_add_``.
    """
    current = weights.index_select(0, rows)
    if decay > 0:
        current.mul_(1 - decay)
    weights.index_copy_(0, rows, current.sub_(change))
