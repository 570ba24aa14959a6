"""The door into TorchRec: a sharder whose lookups build our kernel for tables marked with our spec.

Input and output distribution, planner, DistributedModelParallel and weight state stay TorchRec's.
Without our spec in ``fused_params`` (backend fbgemm) TorchRec's own fused kernel runs, behind the
same striping of ids, so both backends hold the same rows in the same places.

Overrides lean on private parts of torchrec 1.8 (``_create_lookups``, ``_create_embedding_kernel``);
tests/embeddings/test_sharder.py holds them to their signatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recsys_basis.embeddings.kernel import SPEC_KEY, RowOptimizerKernel
from recsys_basis.embeddings.sending import SentIds
from recsys_basis.embeddings.spec import ShardingName
from recsys_basis.embeddings.striping import Striping
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table


class RowOptimizerSharder(EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection of ``tables``.

    fused_params: by table name, {SPEC_KEY: EmbeddingSpec} for our kernel, or FBGEMM's own (optimizer,
    learning_rate, …). Tables whose params are equal share a kernel.
    codecs: by which collectives of pooled vectors send fewer bits, by TorchRec's name of each.
    """

    def __init__(
        self,
        tables: tuple[Table, ...],
        fused_params: Mapping[str, dict[str, Any]],
        codecs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry=codecs)
        self.tables = tables
        self.fused_params_of_table = fused_params

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """Raises ConfigError for a plan that would be computed wrongly."""
        _refuse_wrong_means(module, params)
        _refuse_replicas(self.fused_params_of_table, params)
        for name, bag in module.embedding_bags.items():
            # Where torchrec 1.8 looks for fused_params of one table.
            bag.weight._optimizer_kwargs = [self.fused_params_of_table[name]]
        return StripedEmbeddingBagCollection(
            self.tables,
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(get_args(ShardingName))

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        return StripedEmbeddingBagCollection


def _refuse_wrong_means(module: EmbeddingBagCollection, params: dict[str, ParameterSharding]) -> None:
    means = [config.name for config in module.embedding_bag_configs() if config.pooling == PoolingType.MEAN]
    grid = _tables_sharded(params, ShardingType.GRID_SHARD)
    if set(means) & set(grid):
        raise ConfigError(
            f"mean pooling under grid_shard (tables {', '.join(grid)}): torchrec 1.8 would never divide the "
            "sums; choose another sharding, or sum pooling"
        )
    row_wise = _tables_sharded(params, ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
    if means and row_wise and len(row_wise) < len(params):
        raise ConfigError(
            f"mean pooling (tables {', '.join(means)}) with some tables row-wise ({', '.join(row_wise)}) and "
            "some not: torchrec 1.8 would divide every table's vectors; shard all tables row-wise, or none"
        )


def _refuse_replicas(
    fused_params: Mapping[str, dict[str, Any]], params: dict[str, ParameterSharding]
) -> None:
    names = _tables_sharded(params, ShardingType.DATA_PARALLEL)
    specs = [fused_params[name].get(SPEC_KEY) for name in names]
    if None in specs:
        raise ConfigError(
            f"data_parallel tables ({', '.join(names)}) with embedding.kernel = fbgemm: its kernels would "
            "not average gradients over ranks; choose embedding.kernel=auto"
        )
    if any(spec is not None and spec.hold_gradients for spec in specs):
        raise ConfigError(
            f"data_parallel tables ({', '.join(names)}) with max_gradient_norm: the norm over ranks would "
            "count their rows once for each rank; shard these tables, or set max_gradient_norm=null"
        )


def _tables_sharded(params: dict[str, ParameterSharding], *types: ShardingType) -> list[str]:
    return [name for name, plan in params.items() if plan.sharding_type in {kind.value for kind in types}]


class StripedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection; ids are striped on the way in, lookups build our kernel."""

    def __init__(self, tables: tuple[Table, ...], **sharding: Any) -> None:
        configs = sharding["module"].embedding_bag_configs()
        by_name = {table.name: table for table in tables}
        super().__init__(**sharding)
        self.striping = Striping(
            {feature: by_name[config.name] for config in configs for feature in config.feature_names}
        )
        self._row_wise_mean = any(
            isinstance(sharding, (RwPooledEmbeddingSharding, TwRwPooledEmbeddingSharding))
            for sharding in self._embedding_shardings
        ) and any(config.pooling == PoolingType.MEAN for config in configs)

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        if self._row_wise_mean and features.weights_or_none() is not None:
            raise ConfigError(
                "mean pooling with per-sample weights under row-wise sharding: torchrec 1.8 divides by the "
                "sum of weights there, by the count elsewhere; shard table-wise, or use sum pooling"
            )
        return super().input_dist(ctx, self.striping(features))

    def forward(self, features: KeyedJaggedTensor | SentIds) -> LazyAwaitable[KeyedTensor]:
        """Pooled vectors of a batch's ids; those that are sent already are waited for."""
        if isinstance(features, SentIds):
            return self.compute_and_output_dist(features.context, features.receive())
        return super().forward(features)

    def _create_lookups(self) -> None:
        for sharding in self._embedding_shardings:
            # As each sharding's own create_lookup; the type tells a kernel who divides a mean.
            by_node = isinstance(sharding, (TwRwPooledEmbeddingSharding, GridPooledEmbeddingSharding))
            sharding_type = None
            if by_node:
                configs = sharding._grouped_embedding_configs_per_rank[sharding._rank]
                sharding_type = ShardingType.TABLE_ROW_WISE
            else:
                configs = sharding._grouped_embedding_configs
                if isinstance(sharding, RwPooledEmbeddingSharding):
                    sharding_type = ShardingType.ROW_WISE
            replicated = isinstance(sharding, DpPooledEmbeddingSharding)
            self._lookups.append(
                RowOptimizerLookup(
                    grouped_configs=configs,
                    device=sharding._device,
                    pg=sharding._env.process_group if replicated else sharding._pg,
                    sharding_type=sharding_type,
                    env=sharding._env,
                )
            )

    def init_data_parallel(self) -> None:
        """Nothing: TorchRec would reduce the gradients of parameters, and backward here leaves none."""


class RowOptimizerLookup(GroupedPooledEmbeddingsLookup):
    """TorchRec's lookup over groups of tables; a group marked with our spec gets our kernel."""

    @property
    def module(self) -> RowOptimizerLookup:
        """Itself: TorchRec unwraps data-parallel lookups, which ``init_data_parallel`` left unwrapped."""
        return self

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: Any,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> Any:
        spec = (config.fused_params or {}).get(SPEC_KEY)
        if spec is None:
            return super()._create_embedding_kernel(config, device, pg, sharding_type, env)
        return RowOptimizerKernel(config, spec, device, pg, sharding_type)
