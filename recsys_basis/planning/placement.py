"""Where TorchRec's planner would put the tables of a config, and the fewest ranks that hold them.

The planner is the one of training, on the meta device: it needs neither ranks nor memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import ShardingType

from recsys_basis.embeddings.collection import create_collection
from recsys_basis.embeddings.kernel import SPEC_KEY, EmbeddingSpec
from recsys_basis.embeddings.plan import TABLES_SHARE, create_planner, create_topology
from recsys_basis.embeddings.sharder import RowOptimizerSharder
from recsys_basis.embeddings.spec import EmbeddingConfig
from recsys_basis.embeddings.storage import piece_state_bytes, state_bytes
from recsys_basis.planning.spec import PlanConfig
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.row_optimizers.storage import DTYPES
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table, TableShard

ROOM_FOR_ALL_GB = 1e9


@dataclass(frozen=True)
class Placement:
    """Where the tables are, and what that costs."""

    where: dict[str, str]
    """Of each table, in words."""
    weight_bytes: dict[str, int]
    """Of each table, all ranks together: replicas each count."""
    state_bytes: dict[str, int]
    """Likewise; a block of columns has its own of what a rule keeps for a row, a rank of what it counts."""
    fullest_rank_bytes: int
    """Weights, state and buffers."""
    fits: bool


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
    weights: Counter[str] = Counter()
    state: Counter[str] = Counter()
    for option in placed:
        for shard in option.shards:
            assert shard.rank is not None and shard.storage is not None
            weights[option.name] += math.prod(shard.size) * DTYPES[dtype].itemsize
            state[option.name] += piece_state_bytes(specs[option.name][SPEC_KEY], option.name, shard.size)
            of_rank[shard.rank] += shard.storage.hbm if config.device == "cuda" else shard.storage.ddr
    where = {option.name: _in_words(option) for option in placed}
    return Placement(where, weights, state, max(of_rank.values()), fits=True)


def place_anyhow(config: PlanConfig, tables: Sequence[Table], rules: Rules) -> Placement:
    """As ``place``, on the ranks of ``config``; where memory is too little, as if there were enough."""
    placement = place(config, tables, rules, config.world_size)
    if placement is not None:
        return placement
    roomy = place(config.model_copy(update={"memory_gb": ROOM_FOR_ALL_GB}), tables, rules, config.world_size)
    assert roomy is not None
    return replace(roomy, fits=False)


def fewest_ranks(config: PlanConfig, tables: Sequence[Table], rules: Rules) -> int | None:
    """The smallest number of ranks on which the tables fit; None if no number does.

    More ranks help until every partition, or every piece that is not cut over all ranks, has one of its own.
    """
    needed = sum(sum(bytes_alone(config.embedding, rules, table)) for table in tables)
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


def bytes_alone(embedding: EmbeddingConfig, rules: Rules, table: Table) -> tuple[int, int]:
    """Bytes of weights and of state of ``table`` on one rank, in one piece."""
    weights = table.num_rows * table.embedding_dim * DTYPES[embedding.weight_dtype].itemsize
    return weights, state_bytes(rules[table.name], TableShard.whole(table), embedding.weight_dtype)


def _in_words(option: ShardingOption) -> str:
    ranks = sorted({shard.rank for shard in option.shards})
    kind = option.sharding_type
    if kind == ShardingType.TABLE_WISE.value:
        return f"{kind} on rank {ranks[0]}"
    return f"{kind} over {len(ranks)} ranks"
