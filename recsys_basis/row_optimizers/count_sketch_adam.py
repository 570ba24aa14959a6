"""Lazy Adam whose moments live in count sketches: rows share bucket rows, each in three places.

Spring, Kyrillidis, Mohan and Shrivastava, "Compressing Gradient Optimizers via Count-Sketches", ICML 2019:
Adam with a count sketch for M and a count-min sketch for V. Row i has bucket row b_j(i) and sign s_j(i) in
each of DEPTH = 3 blocks of buckets; moments are read as
    M(i) = median_j s_j(i) M_b_j(i)        V(i) = max(0, min_j V_b_j(i))            elementwise over D
State: M (not for beta1 = 0), V [K, D] float32; t [T] int64, one a table. For each update of a table, and its
touched rows i with summed gradients g_i [D]:
1. t <- t + 1
2. m_i = (1 - beta1) (g_i - M(i));  v_i = (1 - beta2) (g_i^2 - V(i))      with the state before this step
3. M_b_j(i) += s_j(i) m_i;  V_b_j(i) += v_i                               for all touched i and each j
4. w_i <- w_i - eta (M(i) / (1 - beta1^t)) / (sqrt(V(i) / (1 - beta2^t)) + eps) - eta lambda w_i
beta1 = 0: M(i) is g_i, the paper's variant that sketches V alone.

A row with two blocks to itself for M, and one for V, gets lazy Adam's step (``adam.py``, but for the place
of eps). The sketches have the same places and signs. A virtual partition of a table has sketches of its own
(``recsys_basis.tables``), of 3 max(1, round(state_ratio n / 3)) bucket rows for its n places, so the result
does not depend on the number of ranks.

Unlike the paper: V(i) is at least 0 (rows that share a bucket and shrink in one step can take more than is
there); the sketch is never scaled down ("cleaning", which the paper uses with Adagrad, whose sums only grow).
Ours alone: decoupled weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field

from recsys_basis.row_optimizers.adam import AdamConfig
from recsys_basis.row_optimizers.base import RowOptimizer, State
from recsys_basis.row_optimizers.basis.buckets import mix64
from recsys_basis.row_optimizers.bias import TableUpdates, bias_correction
from recsys_basis.row_optimizers.partitions import Partitions, partitions_of_shard
from recsys_basis.row_optimizers.rows import change_rows
from recsys_basis.segments import Segments
from recsys_basis.tables import Table, TableShard

DEPTH = 3


class CountSketchAdamConfig(AdamConfig):
    """Keys of ``rule: count_sketch_adam``."""

    state_ratio: Annotated[float, Field(gt=0.0)]
    """Bucket rows of a sketch, all three blocks together, over rows of the table."""
    hash_seed: Annotated[int, Field(ge=0)]


class SketchMap:
    """Where a group's rows live in the sketches on this rank; tensors are indexed by partition.

    width  [partitions] int64, bucket rows of a block: those of block j are start + j width onwards
    start  [partitions] int64, first bucket row
    seeds  [DEPTH, partitions] int64, of the table's name, the partition and ``hash_seed``
    """

    def __init__(
        self, config: CountSketchAdamConfig, shards: Sequence[TableShard], device: torch.device
    ) -> None:
        self.config = config
        self.partitions = Partitions(shards, device)
        places = [
            (shard.table, shard.first_partition + p) for shard in shards for p in range(shard.num_partitions)
        ]
        self.width = torch.tensor([self.width_of(table) for table, _ in places], dtype=torch.int64)
        self.start = DEPTH * (self.width.cumsum(0) - self.width).to(device)
        self.num_buckets = DEPTH * int(self.width.sum())
        self.width = self.width.to(device)
        seeds = [
            [table.seed("sketch", config.hash_seed, block, partition) for table, partition in places]
            for block in range(DEPTH)
        ]
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=device)

    def width_of(self, table: Table) -> int:
        """Bucket rows of a block of each partition of ``table``."""
        return max(1, round(self.config.state_ratio * table.rows_per_partition / DEPTH))

    def of_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bucket rows [DEPTH, U] int64, and signs [DEPTH, U] float32, of group ``rows`` [U]."""
        partition = self.partitions.of_rows(rows)
        place = rows - self.partitions.row_start[partition]
        mixed = mix64(place ^ self.seeds.index_select(1, partition))
        # The sign is the upper bit, the bucket comes from the others.
        sign = torch.where(mixed < 0, -1.0, 1.0)
        width = self.width[partition]
        block = torch.arange(DEPTH, device=rows.device)[:, None]
        return self.start[partition] + block * width + (mixed & ((1 << 63) - 1)) % width, sign


class CountSketchAdam(RowOptimizer):
    """Both moments in sketches [K, D]."""

    config_type = CountSketchAdamConfig
    config: CountSketchAdamConfig

    def __init__(
        self, config: CountSketchAdamConfig, shards: Sequence[TableShard], device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, shards, device)
        self.sketch = SketchMap(config, self.shards, self.device)
        shape = (self.sketch.num_buckets, self.embedding_dim)
        self.second = torch.zeros(shape, device=self.device)
        self.updates = TableUpdates(self.row_starts, self.device)
        self.state["second_moment"] = State(self.second, "bucket")
        self.state["updates"] = State(self.updates.count, "table")
        if config.beta1 > 0:
            self.first = torch.zeros(shape, device=self.device)
            self.state["first_moment"] = State(self.first, "bucket")

    def buckets_of_shard(self, shard: TableShard, name: str) -> tuple[int, int, int]:
        """As in the base class: all three blocks of each partition."""
        return partitions_of_shard(shard, DEPTH * self.sketch.width_of(shard.table))

    def update(
        self, weights: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, learning_rate: float
    ) -> None:
        """Steps 1 to 4 of this file's docstring; shapes as in the base class."""
        beta1, beta2 = self.config.beta1, self.config.beta2
        updates = self.updates.advance(rows)  # 1
        buckets, sign = self.sketch.of_rows(rows)
        touched = Segments.of(buckets.view(-1))
        change_v = (gradients.square() - self._second(buckets)) * (1 - beta2)  # 2
        self._add(self.second, touched, change_v, None)  # 3
        direction = gradients
        if beta1 > 0:
            change_m = (gradients - self._first(buckets, sign)) * (1 - beta1)  # 2
            self._add(self.first, touched, change_m, sign.view(-1))  # 3
            direction = self._first(buckets, sign)
        second = self._second(buckets) / bias_correction(beta2, updates)[:, None]  # 4
        factor = learning_rate / bias_correction(beta1, updates)
        change = factor[:, None] * direction / second.sqrt_().add_(self.config.eps)
        change_rows(weights, change, learning_rate * self.config.weight_decay)

    def _first(self, buckets: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        """M(i) [U, D]."""
        return (self.first[buckets] * sign[:, :, None]).median(0).values

    def _second(self, buckets: torch.Tensor) -> torch.Tensor:
        """V(i) [U, D]."""
        return self.second[buckets].amin(0).clamp_(min=0)

    @staticmethod
    def _add(
        sketch: torch.Tensor, touched: Segments, changes: torch.Tensor, sign: torch.Tensor | None
    ) -> None:
        """Add to each touched bucket row the ``changes`` [U, D] of its rows; ``sign`` [DEPTH * U]."""
        row_of_item = torch.arange(len(changes), device=changes.device).repeat(DEPTH)
        new = sketch.index_select(0, touched.keys).add_(touched.sum(changes, row_of_item, sign))
        sketch.index_copy_(0, touched.keys, new)
