"""SM3 on embedding rows: Adagrad whose sums are bounded by one number a row, and if wanted one a column.

Anil, Gupta, Koren and Singer, "Memory-Efficient Adaptive Optimization", NeurIPS 2019, algorithm SM3-II.
Weight (i, d) is covered by row i, which keeps mu_i, and under covers=rows_and_columns also by column d of
row i's virtual partition p (``recsys_basis.tables``), which keeps c_pd: a partition is the paper's matrix.
State: mu [R] float32; for rows_and_columns c [partitions, D] float32.
For the touched rows i, with summed gradients g_i [D], elementwise:
1. nu_i = mu_i + g_i^2                    rows_and_columns: nu_i = min(mu_i, c_p) + g_i^2
2. mu_i <- max_d nu_i                     rows_and_columns: c_p <- max(c_p, nu_i of each touched row i of p)
3. w_i <- w_i - eta g_i / (sqrt(nu_i) + eps) - eta lambda w_i

Leaving out the other rows changes nothing: nu only grows (the paper's proof of proposition 3), so their
min(mu_i, c_p) has the maximum mu_i over d, and none of them exceeds c_p. This is SM3-II on the dense
gradient, number for number.
covers=rows is rowwise Adagrad with max_d g_i^2 in the place of mean_d g_i^2: mu_i bounds the Adagrad sum of
each weight of the row from above, up to D times rowwise Adagrad's, and nu_i holds this step's own g_i^2.
Columns lower the bound only where a column's largest sum is below a row's, so for rows that most batches
touch; a rare row's mu_i is below nearly every c_pd, which the partition's commonest row has set.

Unlike the paper, eps stands beside the root, as in ``adagrad.py``, where the paper says 0 / 0 = 0. As in its
algorithms, and unlike its experiments, there is no momentum. Ours alone: decoupled weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from recsys_basis.row_optimizers.adagrad import AdagradConfig
from recsys_basis.row_optimizers.base import RowOptimizer, State
from recsys_basis.row_optimizers.partitions import Partitions, partitions_of_shard
from recsys_basis.row_optimizers.rows import change_rows
from recsys_basis.tables import TableShard


class SM3Config(AdagradConfig):
    """Keys of ``rule: sm3``."""

    covers: Literal["rows", "rows_and_columns"]


class SM3(RowOptimizer):
    """Largest sums: of each row [R], and at choice of each column of a partition [partitions, D]."""

    config_type = SM3Config
    config: SM3Config

    def __init__(
        self, config: SM3Config, shards: Sequence[TableShard], device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, shards, device)
        self.partitions = Partitions(self.shards, self.device)
        self.row_maxima = torch.zeros(self.num_rows, device=self.device)
        self.state["row_maxima"] = State(self.row_maxima, "row")
        if config.covers == "rows_and_columns":
            self.column_maxima = torch.zeros(self.partitions.count, self.embedding_dim, device=self.device)
            self.state["column_maxima"] = State(self.column_maxima, "bucket")

    def buckets_of_shard(self, shard: TableShard, name: str) -> tuple[int, int, int]:
        """As in the base class: one row of column state a partition."""
        return partitions_of_shard(shard)

    def update(
        self, weights: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, learning_rate: float
    ) -> None:
        """Steps 1 to 3 of this file's docstring; shapes as in the base class."""
        columns = self.config.covers == "rows_and_columns"
        bound = self.row_maxima.index_select(0, rows)[:, None]
        if columns:
            partition = self.partitions.of_rows(rows)
            bound = torch.minimum(bound, self.column_maxima.index_select(0, partition))
        sums = bound + gradients.square()  # 1
        self.row_maxima.index_copy_(0, rows, sums.amax(1))  # 2
        if columns:
            self.column_maxima.scatter_reduce_(0, partition[:, None].expand_as(sums), sums, "amax")
        change = learning_rate * gradients / sums.sqrt_().add_(self.config.eps)  # 3
        change_rows(weights, change, learning_rate * self.config.weight_decay)
