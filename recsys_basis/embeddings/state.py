"""Row-optimizer state as TorchRec sees it: a fused optimizer whose state is ShardedTensors.

TorchRec's own ``EmbeddingFusedOptimizer`` takes every state for [N] or [N, D]. Ours also has
bucket rows [K] and [K, D]; a row shard owns the bucket rows of its partitions, so each state's
shards follow from the weight's shards by one ratio: state rows over table rows.
"""

from __future__ import annotations

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

    ``state_dict()["state"]["<table>.weight"]["<table>.<state>"]`` is a ShardedTensor aliasing live
    memory, or for per-table numbers a plain [1] tensor, equal on every rank.
    """

    def __init__(
        self,
        bags: RowOptimizedEmbeddingBags,
        tables: list[ShardedEmbeddingTable],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.bags = bags
        self._tables = {table.name: table for table in tables}
        self._process_group = process_group
        self._weights = dict(zip(self._tables, bags.split_embedding_weights(), strict=True))
        params = {f"{name}.weight": weight for name, weight in self._weights.items()}
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

    def step(self, closure: Any = None) -> None:
        """After backward: apply held gradients, if gradient clipping holds them."""
        self.bags.apply_held()

    def _expose_state(self) -> None:
        for state in self.bags.row_optimizer.table_states():
            entry: Any = state.tensor
            if state.per != "table":
                entry = _as_sharded_tensor(state, self._tables[state.table], self._process_group)
            self.state[self._weights[state.table]][f"{state.table}.{state.name}"] = entry


def local_tensors(value: Any) -> list[Any]:
    """What this rank holds of a state_dict's entry: the local shards of a ShardedTensor, else the entry."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value]


def _as_sharded_tensor(
    state: TableState, table: ShardedEmbeddingTable, process_group: dist.ProcessGroup | None
) -> ShardedTensor:
    weight = table.global_metadata
    if weight is None or table.local_metadata is None:
        raise ValueError(f"table {table.name} has no shard metadata: was it sharded by TorchRec?")
    if any(shard.shard_sizes[1] != weight.size[1] for shard in weight.shards_metadata):
        raise ValueError(f"table {table.name}: column-wise sharding is not supported by row optimizers here")
    num_rows, tail = weight.size[0], list(state.tensor.shape[1:])

    def place(shard: ShardMetadata) -> ShardMetadata:
        rows = [
            value * state.global_rows // num_rows for value in (shard.shard_offsets[0], shard.shard_sizes[0])
        ]
        return ShardMetadata([rows[0]] + [0] * len(tail), [rows[1], *tail], shard.placement)

    local = place(table.local_metadata)
    owned, kept = (local.shard_offsets[0], local.shard_sizes[0]), (state.offset, len(state.tensor))
    if owned != kept:
        raise ValueError(
            f"table {table.name}: state {state.name!r} has (offset, rows) {kept}, its shard owns {owned}"
        )
    properties = type(weight.tensor_properties)(dtype=state.tensor.dtype)
    metadata = ShardedTensorMetadata(
        shards_metadata=[place(shard) for shard in weight.shards_metadata],
        size=torch.Size([state.global_rows, *tail]),
        tensor_properties=properties,
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=[Shard(state.tensor, local)],
        sharded_tensor_metadata=metadata,
        process_group=process_group,
    )
