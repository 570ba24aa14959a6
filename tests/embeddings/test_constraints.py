"""What the planner may choose from; a sharding that a table cannot have is refused, not quietly replaced."""

from __future__ import annotations

from typing import Any

import pytest
from support.embedding import embedding_config
from torchrec.distributed.planner import Topology

from recsys_basis.embeddings.constraints import sharding_constraints
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table

TABLES = (Table("C1", 61, 8, 4), Table("C10", 30, 8, 2), Table("D2", 5, 8, 1))


def allowed(world_size: int, **changes: Any) -> dict[str, list[str] | None]:
    topology = Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu")
    constraints = sharding_constraints(TABLES, embedding_config(**changes), topology)
    return {name: entry.sharding_types for name, entry in constraints.items()}


def test_auto_lets_the_planner_cut_tables_whose_partitions_divide_among_the_ranks() -> None:
    both, whole = ["table_wise", "row_wise"], ["table_wise"]
    assert allowed(1) == {"C1": whole, "C10": whole, "D2": whole}
    assert allowed(2) == {"C1": both, "C10": both, "D2": whole}
    assert allowed(4) == {"C1": both, "C10": whole, "D2": whole}
    assert allowed(3) == {"C1": whole, "C10": whole, "D2": whole}


def test_row_wise_leaves_tables_too_small_for_it_whole() -> None:
    assert allowed(4, sharding="row_wise") == {
        "C1": ["row_wise"],
        "C10": ["table_wise"],
        "D2": ["table_wise"],
    }


def test_shards_within_a_node_divide_among_its_ranks() -> None:
    topology = Topology(world_size=8, local_world_size=2, compute_device="cpu")
    for sharding, too_small in (("table_row_wise", "table_wise"), ("grid_shard", "column_wise")):
        embedding = embedding_config(sharding=sharding, embedding_dim=8, column_shards=2)
        found = sharding_constraints(TABLES, embedding, topology)
        assert {name: entry.sharding_types for name, entry in found.items()} == {
            "C1": [sharding],
            "C10": [sharding],
            "D2": [too_small],
        }
        assert found["D2"].min_partition == (8 if sharding == "table_row_wise" else 4)


def test_an_exact_name_counts_most_and_then_the_first_glob() -> None:
    patterns = {"C1*": "row_wise", "C10": "table_wise", "?*": "table_wise"}
    assert allowed(2, table_sharding=patterns) == {
        "C1": ["row_wise"],
        "C10": ["table_wise"],
        "D2": ["table_wise"],
    }
    assert allowed(2, table_sharding={"C1*": "row_wise"})["D2"] == ["table_wise"]


@pytest.mark.parametrize("pattern", ["C2", "c1", "E*"])
def test_a_name_that_is_no_table_is_refused_with_the_tables(pattern: str) -> None:
    with pytest.raises(ConfigError, match=rf"table_sharding\.{pattern[:2]}.* C1, C10, D2"):
        allowed(2, table_sharding={pattern: "table_wise"})


def test_a_table_that_is_named_for_what_it_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sharding: C10 cannot be row_wise with 2 partition"):
        allowed(4, table_sharding={"C*": "row_wise"})


def test_ranks_that_no_partitions_divide_among_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"embedding\.sharding = row_wise: .*at most 4.* 3 ranks"):
        allowed(3, sharding="row_wise")
    named = {"C*": "table_wise"}
    with pytest.raises(ConfigError, match=r"at most 1\)"):
        allowed(2, sharding="row_wise", table_sharding=named)
    assert allowed(3, sharding="row_wise", table_sharding={"*": "table_wise"})["C1"] == ["table_wise"]
