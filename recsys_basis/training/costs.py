"""What a run costs, measured from what lives in memory, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from recsys_basis.embeddings.state import local_tensors
from recsys_basis.metrics.resources import RowMeter, optimizer_state_bytes, peak_memory_bytes
from recsys_basis.training.build import Trainable


@dataclass(frozen=True)
class Costs:
    """Bytes are sums over ranks, except ``peak_memory_bytes``: the largest rank's resident memory."""

    optimizer_bytes: int
    """State of the embedding rows' optimizer."""
    dense_optimizer_bytes: int
    """State of the towers' optimizer, on one rank: every rank holds the same."""
    weight_bytes: int
    """Weights of the embedding tables."""
    rows_per_second: float | None
    peak_memory_bytes: int


def measure_costs(trainable: Trainable, speed: RowMeter) -> Costs:
    """Collective: every rank calls it, and gets the same answer but for its own speed."""
    tables = tuple(f".{table.name}.weight" for table in trainable.tables)
    weights = [value for key, value in trainable.model.state_dict().items() if key.endswith(tables)]
    sums = torch.tensor([_row_state_bytes(trainable), _local_bytes(weights)])
    peak = torch.tensor([peak_memory_bytes()])
    dist.all_reduce(sums)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return Costs(
        optimizer_bytes=int(sums[0]),
        dense_optimizer_bytes=optimizer_state_bytes(trainable.dense_optimizer),
        weight_bytes=int(sums[1]),
        rows_per_second=speed.rows_per_second,
        peak_memory_bytes=int(peak),
    )


def _row_state_bytes(trainable: Trainable) -> int:
    """Of this rank."""
    bags = trainable.embedding_bags()
    if bags:
        return sum(each.row_optimizer.state_bytes() for each in bags)
    state = trainable.row_optimizer.state_dict()["state"]  # FBGEMM's, or nothing
    return _local_bytes(value for entries in state.values() for value in entries.values())


def _local_bytes(values: Iterable[Any]) -> int:
    return sum(tensor.nbytes for value in values for tensor in local_tensors(value))
