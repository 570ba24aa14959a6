"""Adafactor on embedding rows: a second moment factored into one number a row and one a column.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018, algorithm 4
without momentum. A virtual partition p of a table (``recsys_basis.tables``) is the paper's matrix, of which
a step sees the touched rows alone: their averages move, their number is n, and the others stay.
State: R [R], t [R] int32; C [partitions, D], t [partitions] int32; the others float32. beta2 constant: no t.
For each partition p, and its touched rows i with summed gradients g_i [D], elementwise:
1. t_i <- t_i + 1; t_p <- t_p + 1; a = t^-decay_power of each     beta2 constant: a = 1 - beta2, at first 1
2. R_i <- R_i + a_i (mean_d g_i^2 + eps - R_i)
3. C_p <- C_p + a_p (mean_i g_i^2 + eps - C_p)
4. u_i = g_i / sqrt(R_i C_p / mean_d C_p)
5. u_i <- u_i / max(1, RMS(u) / update_clip)                      over the D n entries of p's touched rows
6. w_i <- w_i - eta u_i - eta lambda w_i

On batches that touch every row of a table of one partition this is the paper's: mean_d C = mean_i R there,
both being averages of the same squares. Where rows come at different rates only mean_d C is known in a step,
and t counts a row's own updates: with the table's, a rare row's first average would be t^-decay_power of
what it should be, and its step far too large. a = t^-decay_power is the paper's 1 - beta2_t (section 7.2);
a_1 = 1, so no bias needs correction.

Left out: the relative step size of section 8 (eta is a rate, as for every rule here).
Ours alone: decoupled weight decay, on touched rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field

from recsys_basis.row_optimizers.base import RowOptimizer, RowOptimizerConfig, State
from recsys_basis.row_optimizers.partitions import Partitions, partitions_of_shard
from recsys_basis.row_optimizers.rows import change_rows
from recsys_basis.segments import Segments
from recsys_basis.tables import TableShard


class AdafactorConfig(RowOptimizerConfig):
    """Keys of ``rule: adafactor``."""

    decay_power: Annotated[float, Field(gt=0.0, le=1.0)]
    """c of beta2_t = 1 - t^-c."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] | None
    """Constant decay of both averages; null: the paper's schedule."""
    eps: Annotated[float, Field(ge=1e-37)]
    """eps_1, added to squared gradients; a normal float32, so that no average is 0."""
    update_clip: Annotated[float, Field(gt=0.0)]
    """d: largest root mean square of a partition's update."""


class Adafactor(RowOptimizer):
    """Averages of squared gradients: of each row [R], of each column of a partition [partitions, D]."""

    config_type = AdafactorConfig
    config: AdafactorConfig

    def __init__(
        self, config: AdafactorConfig, shards: Sequence[TableShard], device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, shards, device)
        self.partitions = Partitions(self.shards, self.device)
        self.row_average = torch.zeros(self.num_rows, device=self.device)
        self.column_average = torch.zeros(self.partitions.count, self.embedding_dim, device=self.device)
        self.state["row_average"] = State(self.row_average, "row")
        self.state["column_average"] = State(self.column_average, "bucket")
        if config.beta2 is None:
            self.row_updates = torch.zeros(self.num_rows, dtype=torch.int32, device=self.device)
            self.column_updates = torch.zeros(self.partitions.count, dtype=torch.int32, device=self.device)
            self.state["row_updates"] = State(self.row_updates, "row")
            self.state["column_updates"] = State(self.column_updates, "bucket")

    def buckets_of_shard(self, shard: TableShard, name: str) -> tuple[int, int, int]:
        """As in the base class: one row of column state a partition."""
        return partitions_of_shard(shard)

    def update(
        self, weights: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, learning_rate: float
    ) -> None:
        """Steps 1 to 6 of this file's docstring; shapes as in the base class."""
        touched = Segments.of(self.partitions.of_rows(rows))
        squares = gradients.square()
        row_average = self._average("row", rows, squares.mean(1))
        columns = touched.sum(squares) / touched.counts[:, None]
        column_average = self._average("column", touched.keys, columns)
        # 4. Roots before the quotient, which may leave float32's range where u itself is sound.
        shape = column_average.mean(1, keepdim=True).sqrt() / column_average.sqrt()
        partition = touched.position_of_items()
        update = gradients / row_average.sqrt()[:, None] * shape.index_select(0, partition)
        mean_square = touched.sum(update.square().mean(1, keepdim=True)).view(-1) / touched.counts
        factor = 1 / (mean_square.sqrt() / self.config.update_clip).clamp(min=1)  # 5
        update *= (learning_rate * factor).index_select(0, partition)[:, None]
        change_rows(weights, update, learning_rate * self.config.weight_decay)  # 6

    def _average(self, of: str, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Steps 1 to 3: the entries ``index`` of R or C after this step, also written to state."""
        state = self.state[f"{of}_average"].tensor
        old = state.index_select(0, index)
        if self.config.beta2 is None:
            counts = self.state[f"{of}_updates"].tensor
            updates = counts.index_select(0, index) + 1
            counts.index_copy_(0, index, updates)
            amount = (updates.double() ** -self.config.decay_power).float()
            amount = amount.view(-1, *[1] * (new.dim() - 1))
        else:
            amount = torch.where(old == 0, 1.0, 1 - self.config.beta2)
        average = old + amount * (new + self.config.eps - old)
        state.index_copy_(0, index, average)
        return average
