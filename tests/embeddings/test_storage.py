"""The planner counts the bytes that live shards have: TorchRec's estimate and the row optimizer's state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.embedding import embedding_config
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ShardingOption
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recsys_basis.embeddings.fbgemm import fbgemm_fused_params
from recsys_basis.embeddings.kernel import SPEC_KEY, EmbeddingSpec
from recsys_basis.embeddings.plan import create_planner
from recsys_basis.embeddings.sharder import RowOptimizerSharder
from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.tables import Table, TableShard

TABLES = (Table("a", 1237, 12, 8), Table("b", 31, 12, 2), Table("c", 3, 12, 1))


def storages(
    config: RowOptimizerConfig, device: str, fused: dict[str, Any], sharding: str = "auto"
) -> list[ShardingOption]:
    """Every shard of every table under every type that two ranks allow, as the planner sees it."""
    embedding = embedding_config(sharding=sharding, embedding_dim=12, column_shards=3)
    embeddings = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name, embedding_dim=12, num_embeddings=table.num_rows, feature_names=[table.name]
            )
            for table in TABLES
        ],
        device=torch.device("meta"),
    )
    sharder = RowOptimizerSharder(TABLES, {table.name: fused for table in TABLES})
    topology = Topology(world_size=2, compute_device=device)
    planner, _ = create_planner(sharder, embedding, topology, batch_size=64)
    return planner._enumerator.enumerate(embeddings, [sharder])


@pytest.mark.parametrize(
    ("device", "sharding", "num_options"),
    [
        ("cpu", "auto", 5),  # whole, and two of the tables also cut into rows
        ("cuda", "auto", 5),
        ("cuda", "column_wise", 3),
        ("cuda", "grid_shard", 3),
        ("cpu", "data_parallel", 3),
    ],
)
@pytest.mark.parametrize("name", ["basis_literal", "partial_rowwise_adam"])
def test_the_planner_adds_what_the_live_state_of_a_shard_takes(
    name: str, device: str, sharding: str, num_options: int
) -> None:
    """For every rule, state_bytes_of is held to live state in row_optimizers/test_contract.py."""
    config = row_optimizer_defaults(name)
    spec = EmbeddingSpec(TABLES, config, False, "torch", "float32")
    ours = storages(config, device, {SPEC_KEY: spec}, sharding)
    assert len(ours) == num_options
    for option, plain in zip(ours, storages(config, device, {}, sharding), strict=True):
        (table,) = (table for table in TABLES if table.name == option.name)
        assert sharding not in ("column_wise", "grid_shard") or {s.size[1] for s in option.shards} == {4}
        for shard, other in zip(option.shards, plain.shards, strict=True):
            columns = replace(table, embedding_dim=shard.size[1])
            live = create_row_optimizer(config, [TableShard(columns, shard.offset[0], shard.size[0])])
            added = shard.storage - other.storage
            expected = (live.state_bytes(), 0) if device == "cuda" else (0, live.state_bytes())
            assert (added.hbm, added.ddr) == expected


def test_under_fbgemm_the_estimate_is_torchrecs() -> None:
    config = row_optimizer_defaults("rowwise_adagrad")
    ours = storages(config, "cpu", fbgemm_fused_params(config, "cpu"))
    for option, plain in zip(ours, storages(config, "cpu", {}), strict=True):
        assert [shard.storage for shard in option.shards] == [shard.storage for shard in plain.shards]
