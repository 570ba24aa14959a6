"""Adagrad: each weight divides by the root of its own summed squared gradients.

Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 2011, figure 1 with diagonal matrices.
State: G [R, D] float32. For each touched row i with summed gradient g_i [D], elementwise:
1. G_i <- G_i + g_i^2
2. w_i <- w_i - eta g_i / (sqrt(G_i) + eps) - eta lambda w_i

As ``torch.optim.Adagrad`` (lr_decay 0, initial accumulator 0) and FBGEMM EXACT_ADAGRAD. The paper adds
its delta inside a matrix root; eps stands outside the root, as in both libraries.
Ours alone: decoupled weight decay, on touched rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field

from recsys_basis.row_optimizers.base import RowOptimizer, RowOptimizerConfig, State
from recsys_basis.row_optimizers.rows import change_rows
from recsys_basis.tables import TableShard


class AdagradConfig(RowOptimizerConfig):
    """Keys of ``rule: adagrad`` and ``rule: rowwise_adagrad``."""

    eps: Annotated[float, Field(gt=0.0)]


class Adagrad(RowOptimizer):
    """Summed squared gradients [R, D]."""

    config_type = AdagradConfig
    config: AdagradConfig

    def __init__(
        self, config: AdagradConfig, shards: Sequence[TableShard], device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, shards, device)
        self.squares = torch.zeros(self.num_rows, self.embedding_dim, device=self.device)
        self.state["sum_of_squares"] = State(self.squares, "row")

    def update(
        self, weights: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, learning_rate: float
    ) -> None:
        """Steps 1 and 2 of this file's docstring; shapes as in the base class."""
        squares = self.squares.index_select(0, rows).addcmul_(gradients, gradients)  # 1
        self.squares.index_copy_(0, rows, squares)
        change = learning_rate * gradients / squares.sqrt_().add_(self.config.eps)  # 2
        change_rows(weights, change, learning_rate * self.config.weight_decay)
