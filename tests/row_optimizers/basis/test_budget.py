"""Byte budgets: never exceeded, used to the last bucket rows, and more bytes never buy less state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.row_variants import VARIANTS

from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.basis import BasisConfig
from recsys_basis.row_optimizers.basis.buckets import PartitionSizes
from recsys_basis.row_optimizers.basis.budget import (
    EXACT_SHARE,
    parse_budget,
    shared_section,
    solve_state_budget,
    solve_state_budgets,
    state_bytes,
)
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table, TableShard

FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"scalar": "none"},
    {"direction": "momentum", "hash": "murmur3"},
    {"direction": "head_momentum", "head_bucket_share": 0.5},
    {"scalar": "hypergradient", "head_rows": 9},
)


def config_of(budget: str, **options: Any) -> BasisConfig:
    config = row_optimizer_defaults("basis", rows_per_bucket=None, state_budget=budget, **options)
    assert isinstance(config, BasisConfig)
    return config


def live_bytes(config: BasisConfig, table: Table) -> int:
    """Of state that a row optimizer really keeps."""
    return create_row_optimizer(config, [TableShard.whole(table)]).state_bytes()


def total(solved: dict[str, BasisConfig], tables: list[Table]) -> int:
    return sum(live_bytes(solved[table.name], table) for table in tables)


def is_exact(config: BasisConfig, table: Table) -> bool:
    sizes = PartitionSizes.of(table, config)
    return sizes.num_private == sizes.num_places


tables_of_one_width = st.builds(
    lambda sizes, width: [
        Table(f"t{number}", ids, width, partitions) for number, (ids, partitions) in enumerate(sizes)
    ],
    st.lists(
        st.tuples(st.one_of(st.integers(1, 60), st.integers(1, 6000)), st.sampled_from([1, 2, 8])),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([1, 3, 16]),
)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(tables=tables_of_one_width, form=st.sampled_from(FORMS), share=st.floats(0.0, 1.1))
def test_a_budget_is_kept_and_used_to_the_last_bucket_rows(
    tables: list[Table], form: dict[str, Any], share: float
) -> None:
    options = config_of("1B", **form)
    num_rows = sum(table.num_rows for table in tables)
    least = sum(live_bytes(shared_section(options, num_rows), table) for table in tables)
    most = sum(live_bytes(shared_section(options, 1.0), table) for table in tables)
    budget = int(least + share * (most - least))
    solved = solve_state_budget(config_of(f"{budget}B", **form), tables)
    used = total(solved, tables)
    assert used <= budget

    sharing = [table for table in tables if not is_exact(solved[table.name], table)]
    ratios = {solved[table.name].rows_per_bucket for table in sharing}
    assert len(ratios) <= 1
    if ratios == {1.0}:  # a hash that may collide, each row with as many bucket rows as rows
        return
    # The next smaller ratio gives each partition of one table a bucket row more, or of several of equal size.
    width = tables[0].embedding_dim
    moments = 2 if options.first_moment != "none" else 1
    bucket_row = 4 * width * moments + 4
    if options.first_moment == "private":
        bucket_row += 4 * width
    assert not sharing or budget - used < bucket_row * sum(table.num_partitions for table in sharing)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(tables=tables_of_one_width, shares=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)))
def test_a_larger_budget_never_buys_less_state_nor_fewer_exact_tables(
    tables: list[Table], shares: tuple[float, float]
) -> None:
    options = config_of("1B")
    num_rows = sum(table.num_rows for table in tables)
    least = sum(state_bytes(shared_section(options, num_rows), table) for table in tables)
    most = sum(state_bytes(shared_section(options, 1.0), table) for table in tables)
    assume(shares[0] < shares[1])
    small, large = (
        solve_state_budget(config_of(f"{int(least + share * (most - least))}B"), tables) for share in shares
    )
    assert total(small, tables) <= total(large, tables)
    exact = [{table.name for table in tables if is_exact(each[table.name], table)} for each in (small, large)]
    assert exact[0] <= exact[1]


def test_small_tables_are_exact_and_the_others_share_one_ratio() -> None:
    """1 % of 100,555 rows of 16 columns: 4 bytes a row of energy, and bucket rows of 4 * 16 + 4 bytes."""
    tables = [Table("large", 100_000, 16, 8), Table("middle", 500, 16, 1), Table("small", 55, 16, 1)]
    solved = solve_state_budget(config_of("1MB"), tables)
    assert total(solved, tables) <= 1_000_000
    bucket_rows = (1_000_000 - 4 * 100_555) / 68
    assert 55 <= EXACT_SHARE * bucket_rows < 500
    assert [is_exact(solved[table.name], table) for table in tables] == [False, False, True]
    ratio = solved["large"].rows_per_bucket
    assert ratio is not None and ratio == solved["middle"].rows_per_bucket
    assert ratio == pytest.approx(100_500 / (bucket_rows - 55), rel=2e-3)
    assert all(each.state_budget is None for each in solved.values())


@pytest.mark.parametrize(("bucket_rows", "exact"), [(4990, False), (5020, False), (5060, True)])
def test_no_bytes_wait_for_a_table_to_become_exact(bucket_rows: int, exact: bool) -> None:
    """50 rows are 1 % of 5,000 bucket rows, but private ones cost 47 bucket rows more than shared ones."""
    tables = [Table("large", 100_000, 16, 8), Table("small", 50, 16, 1)]
    budget = 4 * 100_050 + 68 * bucket_rows
    solved = solve_state_budget(config_of(f"{budget}B"), tables)
    assert is_exact(solved["small"], tables[1]) == exact
    assert 0 <= budget - total(solved, tables) < 68 * 9  # a bucket row for each of nine partitions


def test_all_is_exact_where_the_budget_suffices() -> None:
    tables = [Table("large", 1000, 4, 2), Table("small", 9, 4, 1)]
    solved = solve_state_budget(config_of("1GB", hash="murmur3"), tables)
    assert all(is_exact(solved[table.name], table) for table in tables)


def test_a_budget_below_the_least_names_it() -> None:
    tables = [Table("large", 1000, 4, 2), Table("small", 9, 4, 1)]
    least = (
        4 * 1009 + 3 * (4 * 4 + 4) + 2 * 8
    )  # energies, a bucket row for each partition, updates of each table
    with pytest.raises(ConfigError) as refusal:
        solve_state_budget(config_of(f"{least - 1}B"), tables)
    assert f"{least - 1:,}" in str(refusal.value) and f"{least:,} at least" in str(refusal.value)
    assert total(solve_state_budget(config_of(f"{least}B"), tables), tables) == least


def test_each_section_has_its_own_budget_and_others_are_left_alone() -> None:
    tables = [Table(name, 1000, 4, 2) for name in ("a", "b", "c", "d")]
    one, other, adam = config_of("50%"), config_of("30%"), row_optimizer_defaults("adam")
    solved = solve_state_budgets({"a": one, "b": other, "c": one, "d": adam}, tables)
    assert list(solved) == ["a", "b", "c", "d"] and solved["d"] is adam
    assert solved["a"] == solved["c"] == solve_state_budget(one, [tables[0], tables[2]])["a"]
    assert solved["b"] == solve_state_budget(other, [tables[1]])["b"] != solved["a"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200MB", 200_000_000), ("1.5kB", 1500), ("2MiB", 2 << 20), ("12B", 12), ("2%", 320), ("12.5%", 2000)],
)
def test_budgets_are_bytes_or_a_share_of_adams_moments(text: str, expected: int) -> None:
    tables = [Table("a", 100, 8, 1), Table("b", 150, 8, 1)]  # two moments of 250 rows of 8 float32
    assert parse_budget(config_of(text).state_budget or "", tables) == expected


@pytest.mark.parametrize(("name", "options"), [(name, each) for name, each in VARIANTS if "basis" in name])
def test_the_bytes_foreseen_are_those_of_live_state(name: str, options: dict[str, Any]) -> None:
    config = row_optimizer_defaults(name, **options)
    assert isinstance(config, BasisConfig)
    for table in (Table("site", 118, 3, 4), Table("device", 3, 16, 1)):
        assert state_bytes(config, table) == live_bytes(config, table)


def test_a_budget_holds_when_all_has_grown() -> None:
    tables = [Table("large", 4000, 4, 2), Table("small", 9, 4, 1)]
    solved = solve_state_budget(config_of("30%", grow_at=[3, 8]), tables)
    grown = 0
    for table in tables:
        optimizer = create_row_optimizer(solved[table.name], [TableShard.whole(table)])
        assert optimizer.grow(8)
        grown += optimizer.state_bytes()
    assert 0.98 * parse_budget("30%", tables) < grown <= parse_budget("30%", tables)


def test_an_unsolved_budget_makes_no_row_optimizer() -> None:
    with pytest.raises(ConfigError, match="state_budget"):
        create_row_optimizer(config_of("1MB"), [TableShard.whole(Table("a", 100, 8, 1))])
