"""Row-optimizer state as TorchRec sees it: a fused optimizer whose state is ShardedTensors.

TorchRec's own ``EmbeddingFusedOptimizer`` takes every state for [N] or [N, D]. Ours also has
bucket rows [K] and [K, D]; a row shard owns the bucket rows of its partitions, so each state's
shards follow from the weight's shards by one ratio: state rows over table rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.optim.fused import FusedOptimizer

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.row_optimizers.base import TableState


class RowFusedOptimizer(FusedOptimizer):
    """The optimizer of one kernel: backward did the work, ``step`` applies what clipping held back.

    ``state_dict()["state"]["<table>.weight"]["<table>.<state>"]`` is a ShardedTensor aliasing live memory, or
    a plain tensor, equal on every rank: per-table numbers [1], and all state of data-parallel tables.
    """

    def __init__(
        self,
        bags: RowOptimizedEmbeddingBags,
        tables: list[ShardedEmbeddingTable],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.bags = bags
        self._tables, self._process_group = tables, process_group
        self._weights: dict[str, torch.Tensor] = {}
        for table, weights in zip(tables, bags.split_embedding_weights(), strict=True):
            self._weights.setdefault(table.name, weights)
        params = {f"{name}.weight": weights for name, weights in self._weights.items()}
        group = {"params": list(params.values()), "lr": bags.learning_rate}
        super().__init__(params, {weight: {} for weight in params.values()}, [group])
        self._expose_state()

    def grow(self, step: int) -> None:
        """Give state the size that it has after ``step`` steps of a run."""
        if self.bags.grow(step):
            self._expose_state()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Before forward: hand the scheduled learning rate to the kernel."""
        self.bags.learning_rate = self.param_groups[0]["lr"]
        for first, *others in self._same:  # a checkpoint may just have been loaded into the first
            for other in others:
                other.copy_(first)

    def step(self, closure: Any = None) -> None:
        """After backward: apply held gradients, if gradient clipping holds them."""
        self.bags.apply_held()

    def _expose_state(self) -> None:
        # A rank may hold several blocks of columns of one table: shards of the same entry.
        parts: dict[tuple[str, str], list[TableState]] = {}
        for part in self.bags.row_optimizer.table_states():
            parts.setdefault((part.table, part.name), []).append(part)
        self._same: list[list[torch.Tensor]] = []
        for (table_name, name), found in parts.items():
            entry: Any = found[0].tensor
            tables = [self._tables[part.shard] for part in found]
            if found[0].per == "table":
                self._same.append([part.tensor for part in found])
            elif tables[0].local_metadata is not None:
                entry = _as_sharded_tensor(found, tables, self._process_group)
            self.state[self._weights[table_name]][f"{table_name}.{name}"] = entry


def local_tensors(value: Any) -> list[Any]:
    """What this rank holds of a state_dict's entry: the local shards of a ShardedTensor, else the entry."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value]


def _as_sharded_tensor(
    parts: list[TableState], tables: list[ShardedEmbeddingTable], process_group: dist.ProcessGroup | None
) -> ShardedTensor:
    """One state of one table; ``parts`` and ``tables`` are this rank's shards of it.

    S blocks of columns keep their states side by side: a [N, D] state is cut as the weights are, and an [N]
    state, one number a row for each block, is [N, S].
    """
    weight, columns = tables[0].global_metadata, tables[0].local_cols
    assert weight is not None, "all shards of a table have metadata, or none has"
    num_rows, blocks = weight.size[0], weight.size[1] // columns
    width = math.prod(parts[0].tensor.shape[1:])
    flat = parts[0].tensor.dim() == 1 and blocks == 1

    def place(shard: ShardMetadata) -> ShardMetadata:
        offset, size = (
            value * parts[0].global_rows // num_rows
            for value in (shard.shard_offsets[0], shard.shard_sizes[0])
        )
        if flat:
            return ShardMetadata([offset], [size], shard.placement)
        block = shard.shard_offsets[1] // columns
        return ShardMetadata([offset, block * width], [size, width], shard.placement)

    local = []
    for part, table in zip(parts, tables, strict=True):
        assert table.local_metadata is not None
        metadata = place(table.local_metadata)
        owned, kept = (metadata.shard_offsets[0], metadata.shard_sizes[0]), (part.offset, len(part.tensor))
        if owned != kept:
            raise ValueError(
                f"table {part.table}: state {part.name!r} has (offset, rows) {kept}, its shard owns {owned}"
            )
        local.append(Shard(part.tensor if flat else part.tensor.view(len(part.tensor), width), metadata))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=local,
        sharded_tensor_metadata=ShardedTensorMetadata(
            shards_metadata=[place(shard) for shard in weight.shards_metadata],
            size=torch.Size([parts[0].global_rows] if flat else [parts[0].global_rows, blocks * width]),
            tensor_properties=type(weight.tensor_properties)(dtype=parts[0].tensor.dtype),
        ),
        process_group=process_group,
    )
