"""How each table may be sharded: what the config says, and what the table's partitions can bear."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType

from recsys_basis.by_table import choose_by_table
from recsys_basis.embeddings.spec import EmbeddingConfig
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table

_TABLE_WISE, _ROW_WISE = ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value
_COLUMN_WISE, _GRID = ShardingType.COLUMN_WISE.value, ShardingType.GRID_SHARD.value


def sharding_constraints(
    tables: Sequence[Table], embedding: EmbeddingConfig, topology: Topology
) -> dict[str, ParameterConstraints]:
    """The sharding types among which TorchRec's planner chooses for each table.

    A table is cut into rows only where its partitions divide among the ranks (``tables.py``). What
    ``table_sharding`` says of a table must be possible; under ``sharding`` those too small for it stay whole
    (under grid_shard they keep their blocks of columns, so that another number of ranks is no other model).
    Raises ConfigError for a name or glob that is no table's, and for a sharding that no table can have.
    """
    chosen = choose_by_table(
        None, embedding.table_sharding or {}, [table.name for table in tables], "embedding.table_sharding"
    )
    named = {name: kind for name, kind in chosen.items() if kind is not None}
    allowed, refused = {}, []
    for table in tables:
        wanted = named.get(table.name, embedding.sharding)
        choices = [wanted] if wanted != "auto" else [_TABLE_WISE, _ROW_WISE][: topology.world_size]
        possible = [kind for kind in choices if table.num_partitions % _row_shards(kind, topology) == 0]
        if not possible and table.name in named:
            refused.append(f"{table.name} cannot be {wanted} with {table.num_partitions} partition(s)")
        allowed[table.name] = possible or [_COLUMN_WISE if wanted == _GRID else _TABLE_WISE]
    if refused:
        raise ConfigError(
            f"embedding.table_sharding: {', '.join(refused)}, which do not divide among "
            f"{topology.world_size} ranks, {topology.local_world_size} a node; let them be table_wise, or "
            "lower embedding.min_rows_per_partition"
        )
    others = [table for table in tables if table.name not in named]
    if others and all(embedding.sharding not in ("auto", *allowed[table.name]) for table in others):
        most = max(table.num_partitions for table in others)
        raise ConfigError(
            f"embedding.sharding = {embedding.sharding}: no table's partitions (at most {most}) divide among "
            f"{_row_shards(embedding.sharding, topology)} ranks; take a power of two of ranks, or lower "
            "embedding.min_rows_per_partition"
        )
    return {
        name: ParameterConstraints(sharding_types=kinds, min_partition=embedding.columns(kinds[0]))
        for name, kinds in allowed.items()
    }


def _row_shards(sharding_type: str, topology: Topology) -> int:
    """Into how many row shards a table is cut."""
    if sharding_type == _ROW_WISE:
        return topology.world_size
    within_node = (ShardingType.TABLE_ROW_WISE.value, _GRID)
    return topology.local_world_size if sharding_type in within_node else 1
