"""Which table goes to which rank: TorchRec's planner under what partitions and config allow."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingPlan, ShardingType

from recsys_basis.embeddings.sharder import RowOptimizerSharder
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table


def plan_sharding(
    model: nn.Module,
    sharder: RowOptimizerSharder,
    sharding: Literal["auto", "table_wise", "row_wise"],
    batch_size: int,
    device_type: str,
) -> ShardingPlan:
    """The plan of all ranks, agreed on by rank 0; ``batch_size`` is a rank's (B).

    A table is sharded row-wise only over ranks that divide its partitions (``tables.py``); under
    ``row_wise`` the tables too small for that are placed table-wise. Raises ConfigError if all are.
    """
    world_size = dist.get_world_size()
    if sharding == "row_wise" and not any(table.num_partitions % world_size == 0 for table in sharder.tables):
        most = max(table.num_partitions for table in sharder.tables)
        raise ConfigError(
            f"embedding.sharding = row_wise: no table's partitions (at most {most}) divide among "
            f"{world_size} ranks; take a power of two of ranks, or lower embedding.min_rows_per_partition"
        )
    constraints = {
        table.name: ParameterConstraints(sharding_types=_allowed(table, sharding, world_size))
        for table in sharder.tables
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device=device_type),
        batch_size=max(1, batch_size),
        constraints=constraints,
        # Share of memory kept for the towers; the alternative, a heuristic, warns that it misjudges them.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.15),
    )
    group = dist.group.WORLD
    assert group is not None
    return planner.collective_plan(model, [sharder], group)


def _allowed(table: Table, sharding: str, world_size: int) -> list[str]:
    row_wise_fits = table.num_partitions % world_size == 0
    if sharding == "row_wise" and row_wise_fits:
        return [ShardingType.ROW_WISE.value]
    if sharding == "auto" and row_wise_fits and world_size > 1:
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]
    return [ShardingType.TABLE_WISE.value]
