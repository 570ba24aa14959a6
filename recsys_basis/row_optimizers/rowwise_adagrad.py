"""Rowwise Adagrad: one number a row, the sum of its mean squared gradients.

Adagrad (Duchi, Hazan and Singer, JMLR 2011) with the square averaged over a row's D weights, the usual
optimizer of large embedding tables (Mudigere et al., "Software-Hardware Co-design for Fast and Scalable
Training of Deep Learning Recommendation Models", ISCA 2022). State: G [R] float32.
For each touched row i with summed gradient g_i [D]:
1. G_i <- G_i + mean_d g_i^2
2. w_i <- w_i - eta g_i / (sqrt(G_i) + eps) - eta lambda w_i

As FBGEMM EXACT_ROWWISE_ADAGRAD with decoupled weight decay (which FBGEMM 1.8 ignores on a CPU).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recsys_basis.row_optimizers.adagrad import AdagradConfig
from recsys_basis.row_optimizers.base import RowOptimizer, State
from recsys_basis.row_optimizers.rows import change_rows
from recsys_basis.tables import TableShard


class RowwiseAdagrad(RowOptimizer):
    """Summed mean squared gradients [R]."""

    config_type = AdagradConfig
    config: AdagradConfig

    def __init__(
        self, config: AdagradConfig, shards: Sequence[TableShard], device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, shards, device)
        self.squares = torch.zeros(self.num_rows, device=self.device)
        self.state["sum_of_squares"] = State(self.squares, "row")

    def update(
        self, weights: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, learning_rate: float
    ) -> None:
        """Steps 1 and 2 of this file's docstring; shapes as in the base class."""
        squares = self.squares.index_select(0, rows).add_(gradients.square().mean(1))  # 1
        self.squares.index_copy_(0, rows, squares)
        factor = learning_rate / squares.sqrt_().add_(self.config.eps)  # 2
        change_rows(weights, factor[:, None] * gradients, learning_rate * self.config.weight_decay)
