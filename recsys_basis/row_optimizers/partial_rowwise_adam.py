"""Partial rowwise Adam: a full first moment, and one second moment a row.

FBGEMM PARTIAL_ROWWISE_ADAM: lazy Adam (``adam.py``; Kingma and Ba, ICLR 2015, algorithm 1) with the
square averaged over a row's D weights. State: M [R, D], v [R] float32; t [T] int64, one a table.
For each update of a table, and each touched row i with summed gradient g_i [D]:
1. t <- t + 1
2. M_i <- beta1 M_i + (1 - beta1) g_i
3. v_i <- beta2 v_i + (1 - beta2) mean_d g_i^2
4. w_i <- w_i - eta (M_i / (1 - beta1^t)) / (sqrt(v_i / (1 - beta2^t)) + eps) - eta lambda w_i

As in FBGEMM, eps stands beside the root of the corrected v, unlike in ``adam.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recsys_basis.row_optimizers.adam import AdamConfig
from recsys_basis.row_optimizers.base import RowOptimizer, State
from recsys_basis.row_optimizers.bias import TableUpdates, bias_correction
from recsys_basis.row_optimizers.rows import change_rows
from recsys_basis.tables import TableShard


class PartialRowwiseAdam(RowOptimizer):
    """First moment [R, D], second moment [R]."""

    config_type = AdamConfig
    config: AdamConfig

    def __init__(
        self, config: AdamConfig, shards: Sequence[TableShard], device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, shards, device)
        self.first = torch.zeros(self.num_rows, self.embedding_dim, device=self.device)
        self.second = torch.zeros(self.num_rows, device=self.device)
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
        second = self.second.index_select(0, rows).lerp_(gradients.square().mean(1), 1 - beta2)  # 3
        self.second.index_copy_(0, rows, second)
        denominator = (second / bias_correction(beta2, updates)).sqrt_().add_(self.config.eps)  # 4
        factor = learning_rate / bias_correction(beta1, updates) / denominator
        change_rows(weights, first.mul_(factor[:, None]), learning_rate * self.config.weight_decay)
