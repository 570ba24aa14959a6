"""The optimizer state that each table really has, over all ranks: row_state.json and words at the start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from rich.filesize import decimal
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsys_basis.row_optimizers.basis import BasisConfig
from recsys_basis.training.build import Trainable


def describe_row_state(trainable: Trainable) -> dict[str, dict[str, Any]]:
    """By table: its rule, rows N, the entries of each state (K of bucket state), and the bytes of all of it.

    Read from live tensors. Collective: every rank calls it and gets the same answer.
    """
    own = {
        key: _size(value)
        for entries in trainable.row_optimizer.state_dict()["state"].values()
        for key, value in entries.items()
    }
    of_ranks: list[dict[str, tuple[int, int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    sizes = {key: size for each in of_ranks for key, size in each.items()}
    described = {}
    for table in trainable.tables:
        states = {key: size for key, size in sizes.items() if key.startswith(f"{table.name}.")}
        described[table.name] = {
            "rule": trainable.row_optimizer_of_table[table.name].rule,
            "rows": table.num_rows,
            "state_rows": {key.removeprefix(f"{table.name}."): rows for key, (rows, _) in states.items()},
            "bytes": sum(num_bytes for _, num_bytes in states.values()),
        }
    return described


def summarize_row_state(trainable: Trainable, described: dict[str, dict[str, Any]]) -> Iterator[str]:
    """One line for each section that some table takes."""
    for config in dict.fromkeys(trainable.row_optimizer_of_table.values()):
        names = [name for name, each in trainable.row_optimizer_of_table.items() if each == config]
        tables = [described[name] for name in names]
        rows = f"{sum(table['rows'] for table in tables):,} rows"
        if isinstance(config, BasisConfig):
            rows += f", {sum(table['state_rows']['second_moment'] for table in tables):,} bucket rows"
        num_bytes = decimal(sum(table["bytes"] for table in tables))
        yield f"{config.rule}: {rows}, {num_bytes} of state on {', '.join(names)}"


def _size(value: Any) -> tuple[int, int]:
    """(entries, bytes) of a whole state, of which this rank may hold a part."""
    size = value.size()
    dtype = value.metadata().tensor_properties.dtype if isinstance(value, ShardedTensor) else value.dtype
    return (size[0] if size else 1), math.prod(size) * dtype.itemsize
