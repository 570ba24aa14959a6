"""Where TorchRec's planner would put the tables of a config, and the fewest ranks that hold them.

The planner is the one of training, on the meta device: it needs neither ranks nor memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import ShardingType

from recsys_basis.embeddings.collection import create_collection
from recsys_basis.embeddings.kernel import SPEC_KEY, EmbeddingSpec
from recsys_basis.embeddings.plan import TABLES_SHARE, create_planner, create_topology
from recsys_basis.embeddings.sharder import RowOptimizerSharder
from recsys_basis.embeddings.spec import EmbeddingConfig
from recsys_basis.embeddings.storage import state_bytes
from recsys_basis.planning.spec import PlanConfig
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.row_optimizers.storage import DTYPES
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table, TableShard


@dataclass(frozen=True)
class Placement:
    """where: of each table, in words. fullest_rank_bytes: weights, state and buffers of the fullest rank."""

    where: dict[str, str]
    fullest_rank_bytes: int


Rules = Mapping[str, RowOptimizerConfig]
"""The row optimizer of each table, state budgets solved."""


def place(config: PlanConfig, tables: Sequence[Table], rules: Rules, world_size: int) -> Placement | None:
    """None where the tables do not fit. Raises ConfigError for a sharding that they cannot have."""
    dtype = config.embedding.weight_dtype
    specs = {
        name: {SPEC_KEY: EmbeddingSpec(tuple(tables), rule, False, "torch", dtype)}
        for name, rule in rules.items()
    }
    sharder = RowOptimizerSharder(tuple(tables), specs)
    # Where nodes cannot be filled evenly TorchRec takes all ranks for one node, and so do we.
    even = world_size % config.ranks_per_node == 0
    topology = create_topology(
        world_size,
        config.ranks_per_node if even else world_size,
        config.device,
        int(config.memory_gb * 1e9),
    )
    planner, placed = create_planner(sharder, config.embedding, topology, config.batch_size // world_size)
    try:
        planner.plan(create_collection(tables, config.embedding.pooling, dtype), [sharder])
    except PlannerError:
        return None
    of_rank: Counter[int] = Counter()
    for option in placed:
        for shard in option.shards:
            assert shard.rank is not None and shard.storage is not None
            of_rank[shard.rank] += shard.storage.hbm if config.device == "cuda" else shard.storage.ddr
    return Placement({option.name: _in_words(option) for option in placed}, max(of_rank.values()))


def fewest_ranks(config: PlanConfig, tables: Sequence[Table], rules: Rules) -> int | None:
    """The smallest number of ranks on which the tables fit; None if no number does.

    More ranks help until every partition, or every piece that is not cut over all ranks, has one of its own.
    """
    needed = sum(weight_bytes(config.embedding, table) + table_state_bytes(rules, table) for table in tables)
    least = max(1, math.ceil(needed / (config.memory_gb * 1e9 * TABLES_SHARE)))
    kinds = {config.embedding.sharding, *(config.embedding.table_sharding or {}).values()}
    within_node = config.ranks_per_node if kinds & {"table_row_wise", "grid_shard"} else 1
    pieces = len(tables) * config.embedding.column_shards * within_node
    most = max(pieces, *(table.num_partitions for table in tables))
    for world_size in range(least, most + 1):
        try:
            if place(config, tables, rules, world_size) is not None:
                return world_size
        except ConfigError:  # an explicit sharding that this number of ranks does not allow
            continue
    return None


def weight_bytes(embedding: EmbeddingConfig, table: Table) -> int:
    """Of the whole table."""
    return table.num_rows * table.embedding_dim * DTYPES[embedding.weight_dtype].itemsize


def table_state_bytes(rules: Rules, table: Table) -> int:
    """Of the whole table."""
    return state_bytes(rules[table.name], TableShard.whole(table))


def _in_words(option: ShardingOption) -> str:
    ranks = sorted({shard.rank for shard in option.shards})
    kind = option.sharding_type
    if kind == ShardingType.TABLE_WISE.value:
        return f"{kind} on rank {ranks[0]}"
    return f"{kind} over {len(ranks)} ranks"
