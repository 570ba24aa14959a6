"""Which table goes to which rank: TorchRec's planner under what memory, partitions and config allow."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import ShardingPlan

from recsys_basis.embeddings.constraints import sharding_constraints
from recsys_basis.embeddings.kernel import SPEC_KEY
from recsys_basis.embeddings.sharder import RowOptimizerSharder
from recsys_basis.embeddings.spec import EmbeddingConfig
from recsys_basis.embeddings.storage import RowStateStorageEstimator
from recsys_basis.schema import ConfigError

TABLES_SHARE = 0.85
"""Of a rank's memory; the rest is for towers, activations and the libraries."""


def plan_sharding(
    model: nn.Module,
    sharder: RowOptimizerSharder,
    embedding: EmbeddingConfig,
    batch_size: int,
    device_type: str,
) -> ShardingPlan:
    """The plan of all ranks, agreed on by rank 0; ``batch_size`` is a rank's (B).

    Raises ConfigError for a sharding that tables cannot have, and for tables that do not fit in memory.
    """
    world_size = dist.get_world_size()
    # TorchRec's own reading of the environment, which warns where there is nothing to read.
    ranks_per_node = get_local_size(world_size) if world_size > 1 else 1
    memory_bytes = _memory_of_a_rank(device_type, ranks_per_node)
    topology = create_topology(world_size, ranks_per_node, device_type, memory_bytes)
    group = dist.group.WORLD
    assert group is not None
    planner, _ = create_planner(sharder, embedding, topology, batch_size)
    try:
        return planner.collective_plan(model, [sharder], group)
    except PlannerError as error:
        raise ConfigError(
            f"the tables, their optimizer state and buffers do not fit on {world_size} rank(s) of "
            f"{memory_bytes / 1e9:.0f} GB; `recsys-basis plan` finds how many ranks they need ({error})"
        ) from error


def create_topology(world_size: int, ranks_per_node: int, device_type: str, memory_bytes: int) -> Topology:
    """Ranks with ``memory_bytes`` each, of which the tables may take ``TABLES_SHARE``."""
    return Topology(
        world_size=world_size,
        local_world_size=ranks_per_node,
        compute_device=device_type,
        hbm_cap=int(memory_bytes * TABLES_SHARE),
        ddr_cap=int(memory_bytes * TABLES_SHARE),
    )


def create_planner(
    sharder: RowOptimizerSharder, embedding: EmbeddingConfig, topology: Topology, batch_size: int
) -> tuple[EmbeddingShardingPlanner, list[ShardingOption]]:
    """TorchRec's planner, told what each table may be and what its optimizer state costs.

    The list receives the shards of each table with their ranks and bytes, once the planner has planned.
    Raises ConfigError for a sharding that tables cannot have.
    """
    constraints = sharding_constraints(sharder.tables, embedding, topology)
    batch_size = max(1, batch_size)
    specs = {
        name: params[SPEC_KEY] for name, params in sharder.fused_params_of_table.items() if SPEC_KEY in params
    }
    storage = RowStateStorageEstimator(topology, constraints, specs)
    estimators = [EmbeddingPerfEstimator(topology, constraints), storage]
    placed: list[ShardingOption] = []

    def keep(plan: list[ShardingOption]) -> list[ShardingOption]:
        placed[:] = plan
        return plan

    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=EmbeddingEnumerator(topology, batch_size, constraints, estimators),
        # Without TorchRec's grid search, whose 8,192 proposals for 13 tables took half a minute.
        proposer=[GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()],
        constraints=constraints,
        # ``create_topology`` has taken it off; TorchRec's reservations know of GPU memory alone.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        stats=[],  # its report would count optimizer state by its own rule
        callbacks=[keep],
    )
    return planner, placed


def _memory_of_a_rank(device_type: str, ranks_per_node: int) -> int:
    if device_type == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_node
