"""What a shard costs, for TorchRec's planner: its own estimate, and the row optimizer's state.

TorchRec finds no optimizer class on our tables and counts nothing for it; a class that it does not know
would count as one times the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Storage

from recsys_basis.embeddings.kernel import EmbeddingSpec
from recsys_basis.embeddings.spec import WeightDtype
from recsys_basis.embeddings.weights import rounding_state_bytes
from recsys_basis.row_optimizers import row_optimizer_class
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.tables import TableShard


class RowStateStorageEstimator(EmbeddingStorageEstimator):
    """Bytes of weights, state and buffers of each shard that the planner considers.

    specs: of the tables with our kernel; the others are FBGEMM's, which TorchRec knows.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        specs: Mapping[str, EmbeddingSpec],
    ) -> None:
        super().__init__(topology=topology, constraints=constraints)
        self.specs = specs
        self.on_device = topology.compute_device == "cuda"

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        """Set ``storage`` of every shard of every option."""
        super().estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            for shard in option.shards if option.name in self.specs else ():
                num_bytes = piece_state_bytes(self.specs[option.name], option.name, shard.size)
                shard.storage += Storage(hbm=num_bytes, ddr=0) if self.on_device else Storage(0, num_bytes)


def piece_state_bytes(spec: EmbeddingSpec, name: str, size: list[int]) -> int:
    """Bytes of optimizer state of a piece of table ``name``, ``size`` = [rows, columns], wherever it lies."""
    table = replace(spec.table(name), embedding_dim=size[1])
    return state_bytes(spec.row_optimizer, TableShard(table, 0, size[0]), spec.weight_dtype)


@functools.cache
def state_bytes(config: RowOptimizerConfig, shard: TableShard, weight_dtype: WeightDtype) -> int:
    """Bytes of optimizer state of ``shard``; planning asks for the same thousands of times."""
    rule = row_optimizer_class(config.rule)
    return rule.state_bytes_of(config, shard) + rounding_state_bytes(weight_dtype)
