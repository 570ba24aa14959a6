"""Tables that do not fit in a rank's memory are refused, state counted, on GPUs as on CPUs."""

from __future__ import annotations

import pytest
import torch
from support.embedding import embedding_config
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recsys_basis.embeddings import plan
from recsys_basis.embeddings.kernel import SPEC_KEY, EmbeddingSpec
from recsys_basis.embeddings.plan import create_planner, create_topology, plan_sharding
from recsys_basis.embeddings.sharder import RowOptimizerSharder
from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table
from recsys_basis.training.runtime import RuntimeConfig, start_runtime

TABLE = Table("a", 100_000, 16, 4)
WEIGHTS = 100_000 * 16 * 4
BUFFERS = 10_000
"""More than a batch of 8 needs."""
EMBEDDINGS = EmbeddingBagCollection(
    tables=[EmbeddingBagConfig(name="a", embedding_dim=16, num_embeddings=100_000, feature_names=["a"])],
    device=torch.device("meta"),
)


def sharder(rule: str) -> RowOptimizerSharder:
    spec = EmbeddingSpec((TABLE,), row_optimizer_defaults(rule), False, "torch", "float32")
    return RowOptimizerSharder((TABLE,), {TABLE.name: {SPEC_KEY: spec}})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("rule", "copies"), [("sgd", 1), ("adam", 3)])
@pytest.mark.parametrize("world_size", [1, 4])
def test_tables_fit_in_85_percent_of_the_memory_that_weights_and_state_take(
    world_size: int, rule: str, copies: int, device: str
) -> None:
    needed = (copies * WEIGHTS // world_size + BUFFERS) / 0.85
    for memory, fits in ((needed, True), (needed - 2 * BUFFERS / 0.85, False)):
        topology = create_topology(world_size, world_size, device, int(memory))
        planner, placed = create_planner(sharder(rule), embedding_config(), topology, batch_size=8)
        if fits:
            planner.plan(EMBEDDINGS, [sharder(rule)])
            assert [shard.rank for option in placed for shard in option.shards] == [*range(world_size)]
        else:
            with pytest.raises(PlannerError):
                planner.plan(EMBEDDINGS, [sharder(rule)])
            assert placed == []


def test_training_on_too_little_memory_is_refused_with_the_job_that_says_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "_memory_of_a_rank", lambda device_type, ranks_per_node: 10_000_000)
    with start_runtime(RuntimeConfig(device="cpu", threads_per_rank=1, collective_timeout_s=60)):
        assert plan_sharding(EMBEDDINGS, sharder("sgd"), embedding_config(), 8, "cpu").plan
        with pytest.raises(ConfigError, match=r"1 rank\(s\) of 0 GB; `recsys-basis plan`"):
            plan_sharding(EMBEDDINGS, sharder("adam"), embedding_config(), 8, "cpu")


def test_memory_of_a_cpu_is_shared_by_its_ranks() -> None:
    (total,) = (line for line in open("/proc/meminfo") if line.startswith("MemTotal:"))
    assert plan._memory_of_a_rank("cpu", 4) == pytest.approx(int(total.split()[1]) * 1024 / 4, rel=1e-3)
