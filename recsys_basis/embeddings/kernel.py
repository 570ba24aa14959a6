"""Our embedding bags as a TorchRec compute kernel (torchrec 1.8: pinned, see torchrec's own classes).

TorchRec builds one kernel for each group of tables on a rank. Base for this one's shape:
``torchrec.distributed.batched_embedding_kernel.BatchedFusedEmbeddingBag``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding_types import (
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
    ShardingType,
)
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.spec import BagsKernel, WeightDtype
from recsys_basis.embeddings.state import RowFusedOptimizer
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.tables import Table, TableShard

SPEC_KEY = "recsys_basis"
"""Entry of ``fused_params`` that marks a table as ours; its value is an ``EmbeddingSpec``."""


@dataclass(frozen=True)
class EmbeddingSpec:
    """What TorchRec carries to each kernel; hashable, since TorchRec groups tables by it."""

    tables: tuple[Table, ...]
    row_optimizer: RowOptimizerConfig
    hold_gradients: bool
    kernel: BagsKernel
    weight_dtype: WeightDtype

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)


class RowOptimizerKernel(BaseBatchedEmbeddingBag[torch.Tensor], FusedOptimizerModule):
    """``RowOptimizedEmbeddingBags`` behind TorchRec's kernel interface."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        spec: EmbeddingSpec,
        device: torch.device | None,
        process_group: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
    ) -> None:
        super().__init__(config, process_group, device, sharding_type)
        # TorchRec gives a row-wise shard of a mean table pooling SUM and divides after the reduction.
        divides_later = sharding_type in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
        mean = config.pooling == PoolingType.MEAN and not divides_later
        self._bags = RowOptimizedEmbeddingBags(
            [_shard(table, spec) for table in config.embedding_tables],
            self._feature_table_map,
            spec.row_optimizer,
            pooling="mean" if mean else "sum",
            hold_gradients=spec.hold_gradients,
            device=device or "cpu",
            kernel=spec.kernel,
            replicas=process_group if _is_replicated(config) else None,
            weight_dtype=spec.weight_dtype,
        )
        self._fused_optimizer = RowFusedOptimizer(self._bags, config.embedding_tables, process_group)
        self._parameters_by_table = _parameters_by_table(self._bags)

    @property
    def emb_module(self) -> RowOptimizedEmbeddingBags:
        return self._bags

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return self._fused_optimizer

    def forward(
        self, features: KeyedJaggedTensor, vbe_output: Any = None, vbe_output_offsets: Any = None
    ) -> torch.Tensor:
        """Pooled vectors [B, F * D] of a KeyedJaggedTensor of rows local to this rank's shards."""
        if features.variable_stride_per_key():
            raise NotImplementedError("batches whose features have different batch sizes are not supported")
        return self._bags(features.values(), features.offsets(), features.weights_or_none())

    def split_embedding_weights(self) -> list[torch.Tensor]:
        return self._bags.split_embedding_weights()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for table, weights in zip(self._config.embedding_tables, self.split_embedding_weights(), strict=True):
            yield append_prefix(prefix, f"{table.name}.weight"), _marked(nn.Parameter(weights, False))

    def named_parameters_by_table(self) -> Iterator[tuple[str, TableBatchedEmbeddingSlice]]:
        yield from self._parameters_by_table.items()


def _shard(table: ShardedEmbeddingTable, spec: EmbeddingSpec) -> TableShard:
    row, column = table.local_metadata.shard_offsets if table.local_metadata else (0, 0)
    # A block of columns is a narrower table of the same rows: same name, so same buckets.
    narrower = replace(spec.table(table.name), embedding_dim=table.local_cols)
    return TableShard(narrower, row, table.local_rows, column)


def _is_replicated(config: GroupedEmbeddingConfig) -> bool:
    # TorchRec gives data-parallel tables no place.
    return any(table.local_metadata is None for table in config.embedding_tables)


def _parameters_by_table(bags: RowOptimizedEmbeddingBags) -> dict[str, TableBatchedEmbeddingSlice]:
    """All rows of each table here, its blocks of columns one after the other, as TorchRec wants them."""
    width, ends = bags.embedding_dim, {}
    starts: dict[str, int] = {}
    for start, shard in zip(bags.row_optimizer.row_starts, bags.row_optimizer.shards, strict=True):
        starts.setdefault(shard.table.name, start)
        ends[shard.table.name] = start + shard.num_rows
    return {
        name: _marked(
            TableBatchedEmbeddingSlice(
                data=bags.weights.view(-1),
                start_offset=start * width,
                end_offset=ends[name] * width,
                num_embeddings=-1,
                embedding_dim=width,
            )
        )
        for name, start in starts.items()
    }


def _marked(parameter: Any) -> Any:
    # Tells DistributedModelParallel's users (in_backward_optimizer_filter) that backward updates it.
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]
    return parameter
