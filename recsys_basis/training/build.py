"""Config and data to a sharded model and the optimizers that train it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from recsys_basis.dense_optimizers import create_dense_optimizer
from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.choice import choose_bags_kernel
from recsys_basis.embeddings.collection import create_collection, create_tables
from recsys_basis.embeddings.fbgemm import fbgemm_fused_params
from recsys_basis.embeddings.initial import initialize_weights
from recsys_basis.embeddings.kernel import SPEC_KEY, EmbeddingSpec
from recsys_basis.embeddings.plan import plan_sharding
from recsys_basis.embeddings.sharder import RowOptimizerSharder, StripedEmbeddingBagCollection
from recsys_basis.embeddings.state import RowFusedOptimizer
from recsys_basis.id_counts import IdCounts
from recsys_basis.ingest.columns import DENSE_COLUMNS
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.models import create_model
from recsys_basis.row_optimizers import row_optimizer_class
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table
from recsys_basis.training.averaging import TowerAverage
from recsys_basis.training.communication import compress_towers, embedding_codecs
from recsys_basis.training.runtime import Runtime
from recsys_basis.training.schedule import learning_rate_factor
from recsys_basis.training.spec import TrainConfig


@dataclass
class Trainable:
    """The sharded model, and its two optimizers under one learning-rate schedule."""

    model: DistributedModelParallel
    tables: tuple[Table, ...]
    row_optimizer_of_table: Mapping[str, RowOptimizerConfig]
    row_optimizer: KeyedOptimizer
    """TorchRec's view of all kernels' optimizers; backward does their work."""
    dense_optimizer: torch.optim.Optimizer
    tower_average: TowerAverage | None
    config: TrainConfig

    def __post_init__(self) -> None:
        self._optimizers = (self.row_optimizer, self.dense_optimizer)
        self._base_rates = [[group["lr"] for group in each.param_groups] for each in self._optimizers]

    def start_step(self, step: int, num_steps: int) -> float:
        """Set this step's learning rates, clear gradients; returns the schedule's factor."""
        factor = learning_rate_factor(self.config.schedule, step, num_steps)
        for optimizer, rates in zip(self._optimizers, self._base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.zero_grad()
        return factor

    def finish_step(self) -> None:
        """After backward: the towers step, and rows that clipping held back are updated."""
        for optimizer in self._optimizers:
            optimizer.step()
        if self.tower_average is not None:
            self.tower_average.update()

    def take_fault(self) -> str | None:
        """Why backward left rows of some table here as they were, if it did."""
        faults = [bags.take_fault() for bags in self.embedding_bags()]
        return next((fault for fault in faults if fault is not None), None)

    def grow(self, step: int) -> bool:
        """Give rows' optimizer state the size that it has after ``step`` steps; whether some here changed."""
        return any([optimizer.grow(step) for optimizer in _fused_optimizers(self.row_optimizer)])

    def dense_parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in dense_parameters(self.model)]

    def column_blocks(self) -> dict[str, int]:
        """S of each table that keeps some of its state once for each of S > 1 blocks of columns."""
        sharding = {name: entry for plan in self.model.plan.plan.values() for name, entry in plan.items()}
        blocks = {}
        for table in self.tables:
            config, count = self.row_optimizer_of_table[table.name], _column_blocks(sharding[table.name])
            if count > 1 and not row_optimizer_class(config.rule).state_follows_columns(config, table):
                blocks[table.name] = count
        return blocks

    def embeddings(self) -> StripedEmbeddingBagCollection:
        """The sharded collection inside the model."""
        (found,) = (
            module for module in self.model.modules() if isinstance(module, StripedEmbeddingBagCollection)
        )
        return found

    def embedding_bags(self) -> list[RowOptimizedEmbeddingBags]:
        """Our kernels on this rank; none under FBGEMM."""
        return [optimizer.bags for optimizer in _fused_optimizers(self.row_optimizer)]


def build(config: TrainConfig, manifest: Manifest, runtime: Runtime) -> Trainable:
    """Raises ConfigError for settings that do not fit each other, the data, or the device."""
    tables = create_tables(config.embedding, manifest.cardinalities)
    row_optimizer_of_table = config.solved_for_tables(tables)
    if any(each.needs_counts for each in row_optimizer_of_table.values()):
        tables = _with_counts(tables, config.dataset.prepared_dir)
    codecs = embedding_codecs(config.communication, config.batch_size, runtime.device)
    sharder = RowOptimizerSharder(
        tables, _fused_params(config, tables, row_optimizer_of_table, runtime), codecs
    )
    embeddings = create_collection(tables, config.embedding.pooling, config.embedding.weight_dtype)
    model = create_model(config.model, embeddings, len(DENSE_COLUMNS), config.seed)
    plan = plan_sharding(
        model,
        sharder,
        config.embedding,
        config.batch_size // runtime.world_size,
        runtime.device.type,
    )
    group = dist.group.WORLD
    assert group is not None
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=runtime.device,
        plan=plan,
        sharders=[sharder],
    )
    compress_towers(config.communication, sharded)
    initialize_weights(sharded, tables, config.embedding.initial_scale, config.seed)
    towers = dense_parameters(sharded)
    dense_optimizer = create_dense_optimizer(config.dense_optimizer, sharded, towers)
    decay = config.tower_average_decay
    average = None if decay is None else TowerAverage(towers, decay)
    trainable = Trainable(
        sharded,
        tables,
        row_optimizer_of_table,
        sharded.fused_optimizer,
        dense_optimizer,
        average,
        config,
    )
    _refuse_budgets_of_blocks(trainable)
    return trainable


def _fused_optimizers(optimizer: KeyedOptimizer) -> Iterator[RowFusedOptimizer]:
    """Those of our kernels in TorchRec's tree; ``model.modules()`` does not reach the bags in its lookups."""
    if isinstance(optimizer, CombinedOptimizer):
        for _, inner in optimizer.optimizers:
            yield from _fused_optimizers(inner)
    elif isinstance(optimizer, RowFusedOptimizer):
        yield optimizer


def _refuse_budgets_of_blocks(trainable: Trainable) -> None:
    asked = trainable.config.of_tables(trainable.tables)
    for name, blocks in trainable.column_blocks().items():
        budget = getattr(asked[name], "state_budget", None)
        if budget is not None:
            raise ConfigError(
                f"state_budget = {budget} counts each state once, but table {name} is cut into {blocks} "
                "blocks of columns, each with a scalar for every row: set rows_per_bucket in place of "
                "state_budget, or shard the table by rows (embedding.table_sharding)"
            )


def _column_blocks(sharding: ParameterSharding) -> int:
    spec = sharding.sharding_spec
    return 1 if spec is None else len({shard.shard_offsets[1] for shard in spec.shards})


def dense_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Named parameters that a torch optimizer updates: all but those that backward updates."""
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not hasattr(parameter, "_in_backward_optimizers")
    ]


def _with_counts(tables: tuple[Table, ...], prepared_dir: str) -> tuple[Table, ...]:
    """``tables`` that know how often each id came where the vocabulary of ``prepared_dir`` was fitted."""
    from recsys_basis.ingest.vocabulary import Fitted  # it brings pandas and DuckDB, which no other run needs

    vocabularies = Fitted.load(prepared_dir).vocabularies
    return tuple(replace(table, counts=IdCounts.of(vocabularies[table.name].id_counts())) for table in tables)


def _fused_params(
    config: TrainConfig,
    tables: tuple[Table, ...],
    row_optimizers: Mapping[str, RowOptimizerConfig],
    runtime: Runtime,
) -> dict[str, dict[str, Any]]:
    """What TorchRec carries to the kernel of each table, by table name."""
    clipping, device_type = config.max_gradient_norm is not None, runtime.device.type
    if config.embedding.kernel == "fbgemm":
        if clipping:
            raise ConfigError(
                "max_gradient_norm with embedding.kernel = fbgemm: FBGEMM updates rows before the norm is "
                "known; choose embedding.kernel=auto, or max_gradient_norm=null"
            )
        if config.embedding.weight_dtype != "float32":
            raise ConfigError(
                f"embedding.weight_dtype = {config.embedding.weight_dtype} with embedding.kernel = fbgemm: "
                "its weights are float32 here; choose embedding.kernel=auto, or weight_dtype=float32"
            )
        return {name: fbgemm_fused_params(each, device_type) for name, each in row_optimizers.items()}
    wanted, dtype = config.embedding.kernel, config.embedding.weight_dtype
    return {
        name: {
            SPEC_KEY: EmbeddingSpec(
                tables, each, clipping, choose_bags_kernel(wanted, each, device_type), dtype
            )
        }
        for name, each in row_optimizers.items()
    }
