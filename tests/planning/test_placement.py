"""How many ranks tables need, worked out by hand from their bytes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.tiny import tiny_config

from recsys_basis.config import compose_job
from recsys_basis.embeddings.collection import create_tables
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.metrics.resources import RowMeter
from recsys_basis.planning.placement import Placement, Rules, fewest_ranks, place, place_anyhow
from recsys_basis.planning.spec import PlanConfig
from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.schema import parse_section
from recsys_basis.training.build import build
from recsys_basis.training.costs import measure_costs
from recsys_basis.training.runtime import start_runtime

BIG = 64 * 1024 * 25
"""Ids of a table of 64 partitions: 104.9 MB of float32 weights at D = 16, 314.6 MB with Adam's state."""


def plan_config(*cardinalities: int, memory_mb: float, **changes: Any) -> PlanConfig:
    """``memory_mb`` is what the tables may take, 85 % of a rank's memory."""
    values = compose_job("plan", [f"cardinalities={list(cardinalities)}", "batch_size=64"]) | changes
    return parse_section(PlanConfig, values | {"memory_gb": memory_mb / 850})


def fewest(config: PlanConfig, rule: str) -> int | None:
    return fewest_ranks(config, tables_of(config), everywhere(config, rule))


def everywhere(config: PlanConfig, rule: str) -> Rules:
    return dict.fromkeys(config.ids_by_table(), row_optimizer_defaults(rule))


def tables_of(config: PlanConfig) -> Any:
    return create_tables(config.embedding, config.ids_by_table())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("rule", "memory_mb", "ranks"),
    [
        ("sgd", 106, 1),  # 104.9 whole
        ("sgd", 103, 2),  # 52.4 each
        ("rowwise_adagrad", 106, 2),  # 104.9 + 6.6
        ("adam", 316, 1),
        ("adam", 158, 2),  # 157.3 each
        ("adam", 156, 4),  # on 3 ranks it would fit, but 64 partitions do not divide among 3
        ("adam", 4.0, None),  # a partition alone takes 4.9
    ],
)
def test_one_table(rule: str, memory_mb: float, ranks: int | None, device: str) -> None:
    assert fewest(plan_config(BIG, memory_mb=memory_mb, device=device), rule) == ranks


@pytest.mark.parametrize(("dtype", "memory_mb"), [("bfloat16", 54), ("float16", 54), ("float32", 106)])
def test_weights_of_two_bytes_take_half_the_memory(dtype: str, memory_mb: float) -> None:
    """52.4 MB of a table that takes 104.9 in float32."""
    embedding = compose_job("plan", [])["embedding"] | {"weight_dtype": dtype}
    assert fewest(plan_config(BIG, memory_mb=memory_mb, embedding=embedding), "sgd") == 1
    assert fewest(plan_config(BIG, memory_mb=memory_mb - 3, embedding=embedding), "sgd") == 2


def test_whole_tables_beside_each_other() -> None:
    """Three of 104.9 MB: 1 or 2 to a rank, on any number of ranks."""
    table_wise = {"embedding": compose_job("plan", [])["embedding"] | {"sharding": "table_wise"}}
    assert fewest(plan_config(BIG, BIG, BIG, memory_mb=106, **table_wise), "sgd") == 3
    assert fewest(plan_config(BIG, BIG, BIG, memory_mb=211, **table_wise), "sgd") == 2
    assert fewest(plan_config(BIG, BIG, BIG, memory_mb=104, **table_wise), "sgd") is None


def test_pieces_of_tables_have_ranks_of_their_own() -> None:
    """Blocks of columns, and rows within a node of 2 ranks."""
    defaults = compose_job("plan", [])["embedding"]
    for changes, ranks in (
        ({"sharding": "column_wise", "column_shards": 4}, 4),
        ({"sharding": "table_row_wise"}, None),  # 52.4 MB: a node of 2 ranks is not enough
        ({"sharding": "grid_shard", "column_shards": 2}, 4),
    ):
        config = plan_config(BIG, memory_mb=28, ranks_per_node=2, embedding=defaults | changes)
        assert fewest(config, "sgd") == ranks, changes


def test_numbers_of_ranks_that_an_explicit_sharding_forbids_are_passed_over() -> None:
    config = plan_config(BIG, memory_mb=40)  # 3 ranks would do
    embedding = config.embedding.model_copy(update={"table_sharding": {"C1": "row_wise"}})
    assert fewest(config.model_copy(update={"embedding": embedding}), "sgd") == 4


def test_ranks_are_filled_with_weights_state_and_buffers() -> None:
    config = plan_config(BIG, 200, memory_mb=200)
    tables, adam = tables_of(config), everywhere(config, "adam")
    two = place(config, tables, adam, 2)
    assert isinstance(two, Placement)
    assert two.where["C1"] == "row_wise over 2 ranks" and two.where["C2"].startswith("table_wise on rank ")
    state_and_weights = 12 * 16 * BIG / 2
    assert 0 < two.fullest_rank_bytes - state_and_weights < 100_000
    assert place(config, tables, adam, 1) is None


def test_nodes_that_are_not_full_count_as_one() -> None:
    config = plan_config(BIG, memory_mb=110, ranks_per_node=4)
    assert place(config, tables_of(config), everywhere(config, "sgd"), 6) is not None


ROUNDED = "embedding.weight_dtype=bfloat16"
CASES = [
    ["row_optimizer=sm3", "embedding.sharding=row_wise"],
    ["row_optimizer.grow_at=[1,2]", "row_optimizer.rows_per_bucket=50"],
    *(
        [f"row_optimizer={rule}", *sharding, ROUNDED]
        for rule, sharding in itertools.product(
            ("adam", "basis"),
            (
                ["embedding.sharding=table_wise"],
                ["embedding.sharding=row_wise"],
                ["embedding.sharding=data_parallel"],
                ["embedding.sharding=column_wise", "embedding.column_shards=4"],
            ),
        )
    ),
]


def measured(prepared: Path) -> list[tuple[int, int]]:
    """(bytes of weights, bytes of state) of a live run of each case, all ranks together."""
    found = []
    with start_runtime(tiny_config(prepared, Path("unused")).runtime) as runtime:
        for case in CASES:
            config = tiny_config(prepared, Path("unused"), *case)
            trainable = build(config, Manifest.load(prepared), runtime)
            trainable.grow(10**6)
            costs = measure_costs(trainable, RowMeter(0))
            found.append((costs.weight_bytes, costs.optimizer_bytes))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plan_counts_the_bytes_that_a_run_measures(prepared: Path, world_size: int) -> None:
    settings = ["device=cpu", "embedding.embedding_dim=8", "embedding.min_rows_per_partition=16"]
    for case, found in zip(CASES, run_ranks(world_size, measured, prepared)[0], strict=True):
        asked = [f"prepared_dir={prepared}", f"world_size={world_size}", *settings, *case]
        config = parse_section(PlanConfig, compose_job("plan", asked))
        tables, rules = tables_of(config), config.solved_for_tables(tables_of(config))
        plan = place_anyhow(config, tables, rules)
        assert (sum(plan.weight_bytes.values()), sum(plan.state_bytes.values())) == found, case
        assert plan.fits


def test_what_does_not_fit_is_counted_all_the_same() -> None:
    config = plan_config(BIG, memory_mb=1)
    plan = place_anyhow(config, tables_of(config), everywhere(config, "adam"))
    assert not plan.fits
    assert plan.weight_bytes["C1"] == 4 * 16 * BIG and 0 <= plan.state_bytes["C1"] - 8 * 16 * BIG <= 8 * 8
