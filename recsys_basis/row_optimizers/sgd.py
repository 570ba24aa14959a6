"""Stochastic gradient descent: no state.

For each touched row i with summed gradient g_i [D]:
1. w_i <- w_i - eta g_i - eta lambda w_i

As ``torch.optim.SGD`` without momentum and FBGEMM EXACT_SGD; the weight decay is ours (decoupled:
for plain SGD it equals L2, but on touched rows only).
"""

from __future__ import annotations

import torch

from recsys_basis.row_optimizers.base import RowOptimizer
from recsys_basis.row_optimizers.rows import change_rows


class SGD(RowOptimizer):
    """w <- w - eta g."""

    def update(
        self, weights: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, learning_rate: float
    ) -> None:
        """Step 1 of this file's docstring; shapes as in the base class."""
        change_rows(weights, learning_rate * gradients, learning_rate * self.config.weight_decay)
