"""Initial weights drawn per table and partition, so that they do not depend on the number of ranks.

TorchRec draws on each rank from that rank's generator: with one seed, two row-wise shards of a
table would start out identical, and another number of ranks would be another model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsys_basis.tables import Table


def leave_uninitialized(weight: torch.Tensor) -> torch.Tensor:
    """The ``init_fn`` given to TorchRec, whose own drawing ``initialize_weights`` replaces."""
    return weight


def initialize_weights(model: nn.Module, tables: Iterable[Table], scale: float, seed: int) -> None:
    """Fill every local shard of every table in ``model`` with U(-a, a), a = scale / sqrt(num_ids)."""
    state = model.state_dict()
    for table in tables:
        (weight,) = (value for key, value in state.items() if key.endswith(f".{table.name}.weight"))
        bound = scale / math.sqrt(table.num_ids)
        for tensor, (row, column) in _local_parts(weight):
            first = row // table.rows_per_partition
            for place, rows in enumerate(tensor.split(table.rows_per_partition)):
                generator = torch.Generator().manual_seed(table.seed("initial", seed, first + place))
                drawn = torch.empty(len(rows), table.embedding_dim)
                drawn.uniform_(-bound, bound, generator=generator)
                rows.copy_(drawn[:, column : column + rows.shape[1]])


def _local_parts(weight: torch.Tensor) -> list[tuple[torch.Tensor, Sequence[int]]]:
    """What this rank holds of a table, and its first row and column; all of it where it is data-parallel."""
    if isinstance(weight, ShardedTensor):
        return [(shard.tensor, shard.metadata.shard_offsets) for shard in weight.local_shards()]
    return [(weight, (0, 0))]
