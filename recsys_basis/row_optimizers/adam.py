"""Lazy Adam: only the rows a batch touched decay their moments and move.

Kingma and Ba, "Adam", ICLR 2015, algorithm 1 in the order of the end of section 2 (eps is that section's
eps-hat: outside the root of the uncorrected V). State: M, V [R, D] float32; t [T] int64, one a table.
For each update of a table, and each touched row i with summed gradient g_i [D], elementwise:
1. t <- t + 1
2. M_i <- beta1 M_i + (1 - beta1) g_i
3. V_i <- beta2 V_i + (1 - beta2) g_i^2
4. w_i <- w_i - eta sqrt(1 - beta2^t) / (1 - beta1^t) M_i / (sqrt(V_i) + eps) - eta lambda w_i

As ``torch.optim.SparseAdam``. Unlike the paper, rows that a batch left alone keep their moments.
FBGEMM ADAM puts eps beside the root of the corrected V. Ours alone: decoupled weight decay (Loshchilov
and Hutter, ICLR 2019), on touched rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field

from recsys_basis.row_optimizers.base import RowOptimizer, RowOptimizerConfig, State
from recsys_basis.row_optimizers.bias import TableUpdates, bias_correction
from recsys_basis.row_optimizers.rows import change_rows
from recsys_basis.tables import TableShard


class AdamConfig(RowOptimizerConfig):
    """Keys of ``rule: adam`` and ``rule: partial_rowwise_adam``."""

    beta1: Annotated[float, Field(ge=0.0, lt=1.0)]
    """Decay of the first moment M."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)]
    """Decay of the second moment V."""
    eps: Annotated[float, Field(gt=0.0)]


class Adam(RowOptimizer):
    """Both moments [R, D]."""

    config_type = AdamConfig
    config: AdamConfig

    def __init__(
        self, config: AdamConfig, shards: Sequence[TableShard], device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, shards, device)
        self.first = torch.zeros(self.num_rows, self.embedding_dim, device=self.device)
        self.second = torch.zeros(self.num_rows, self.embedding_dim, device=self.device)
        self.updates = TableUpdates(self.row_starts, self.device)
        self.state["first_moment"] = State(self.first, "row")
        self.state["second_moment"] = State(self.second, "row")
        self.state["updates"] = State(self.updates.count, "table")

    def update(
        self, weights: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, learning_rate: float
    ) -> None:
        """Steps 1 to 4 of this file's docstring; shapes as in the base class."""
        beta1, beta2 = self.config.beta1, self.config.beta2
        updates = self.updates.advance(rows)  # 1
        first = self.first.index_select(0, rows).lerp_(gradients, 1 - beta1)  # 2
        self.first.index_copy_(0, rows, first)
        second = self.second.index_select(0, rows).lerp_(gradients.square(), 1 - beta2)  # 3
        self.second.index_copy_(0, rows, second)
        factor = bias_correction(beta2, updates).sqrt_() / bias_correction(beta1, updates)  # 4
        change = first.mul_(learning_rate * factor[:, None]).div_(second.sqrt_().add_(self.config.eps))
        change_rows(weights, change, learning_rate * self.config.weight_decay)
