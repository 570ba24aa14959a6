"""A byte budget for the optimizer state of all BASIS tables together, solved before training.

One ratio r = N / K serves all tables that share buckets. A small table, of no more rows than ``EXACT_SHARE``
of the bucket rows that r gives all tables, costs little and shares nothing: each row has its own bucket row.
The smallest r that fits the budget is taken, with the small tables that follow from it; then, with these
kept, r is lowered to the last bucket row that still fits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ByteSize, TypeAdapter

from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.row_optimizers.basis.buckets import PartitionSizes
from recsys_basis.row_optimizers.basis.reference import Basis
from recsys_basis.row_optimizers.basis.spec import BasisConfig
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table, TableShard

EXACT_SHARE = 0.01
"""26 tables that just pass would take a quarter of the bucket rows; real ones take little.

Measured beside a share of 0, with state_budget=2% and scalar_dtype=log8: of the 137 k Kaggle rows' 26 tables
(D = 16) 5 share nothing, and r rises by 2.4 % (43.3 to 44.3); of MLPerf's (D = 128) 18, and r rises by 1.5 %
(26.5 to 26.9). A share of 0.1 would cost 15 % and 16 %. No gain was seen: the AUC of experiment=kaggle_137k
moved by +0.00045, -0.00042 and -0.00011 with seeds 0, 1 and 2.
"""

BISECTIONS = 60
"""Ratios within [1, N] are then told apart to float64."""


def solve_state_budgets(
    configs: Mapping[str, RowOptimizerConfig], tables: Sequence[Table]
) -> dict[str, RowOptimizerConfig]:
    """``configs`` of each table, with every ``state_budget`` replaced by the ``rows_per_bucket`` it allows.

    Tables under equal sections share one budget. Raises ConfigError naming the least one that is possible.
    """
    solved = dict(configs)
    for config in dict.fromkeys(configs.values()):
        if isinstance(config, BasisConfig) and config.state_budget is not None:
            members = [table for table in tables if configs[table.name] == config]
            solved |= solve_state_budget(config, members)
    return solved


def solve_state_budget(config: BasisConfig, tables: Sequence[Table]) -> dict[str, BasisConfig]:
    """Sections by table name whose state takes at most ``config.state_budget``; raises as above."""
    assert config.state_budget is not None
    budget = parse_budget(config.state_budget, tables)
    num_rows = sum(table.num_rows for table in tables)

    def sections(ratio: float, largest_exact: float) -> dict[str, BasisConfig]:
        exact, shared = exact_section(config), shared_section(config, ratio)
        return {table.name: exact if table.num_rows <= largest_exact else shared for table in tables}

    def fits(ratio: float, largest_exact: float) -> bool:
        chosen = sections(ratio, largest_exact)
        return sum(state_bytes(chosen[table.name], table) for table in tables) <= budget

    def largest_exact(ratio: float) -> float:
        return EXACT_SHARE * num_rows / ratio if ratio > 1 else num_rows

    if not fits(num_rows, 0):
        least = {table.name: state_bytes(shared_section(config, num_rows), table) for table in tables}
        raise ConfigError(
            f"state_budget = {config.state_budget} is {budget:,} bytes, and the state of {', '.join(least)} "
            f"takes {sum(least.values()):,} at least: what each row keeps of its own, and one bucket row for "
            "each partition; raise the budget, or choose a scalar that takes less"
        )
    ratio = _smallest(lambda each: fits(each, largest_exact(each)), num_rows)
    exact = largest_exact(ratio)
    return sections(_smallest(lambda each: fits(each, exact), ratio), exact)


def exact_section(config: BasisConfig) -> BasisConfig:
    """``config`` with a private bucket row for each row, whatever the hash."""
    return _resolved(config, rows_per_bucket=1.0, head_rows=0, head_bucket_share=1.0)


def shared_section(config: BasisConfig, ratio: float) -> BasisConfig:
    """``config`` with ``ratio`` rows a bucket row."""
    return _resolved(config, rows_per_bucket=ratio)


def state_bytes(config: BasisConfig, table: Table) -> int:
    """Bytes of state of the whole ``table``, fully grown: of one entry of each state, times its entries."""
    sizes = PartitionSizes.of(table, config, len(config.grow_at))
    total = 0
    for name, (per, entry_bytes) in _entries(exact_section(config), table.embedding_dim).items():
        if per == "table":
            total += entry_bytes
            continue
        if per == "row":
            count = sizes.num_places
        elif name == "first_moment" and config.first_moment == "private":
            count = sizes.num_private
        else:
            count = sizes.num_buckets
        total += table.num_partitions * count * entry_bytes
    return total


def parse_budget(text: str, tables: Sequence[Table]) -> int:
    """Bytes of ``200MB``, ``1.5GiB``; or of ``2%``, a share of the two moments that Adam keeps of ``tables``.

    Raises ValueError for anything else.
    """
    if text.endswith("%"):
        adam = sum(2 * 4 * table.num_rows * table.embedding_dim for table in tables)
        return int(float(text.removesuffix("%")) / 100 * adam)
    return int(TypeAdapter(ByteSize).validate_python(text))


def _resolved(config: BasisConfig, **values: Any) -> BasisConfig:
    return config.model_copy(update={"state_budget": None, "bucket_rows": None, **values})


@functools.cache
def _entries(exact: BasisConfig, width: int) -> dict[str, tuple[str, int]]:
    """By state, what its entries count and the bytes of one, read off the rule with a table of one row."""
    probe = Basis(exact, [TableShard.whole(Table("probe", 1, width, 1))], "meta")
    return {name: (state.per, state.tensor.nbytes) for name, state in probe.state.items()}


def _smallest(fits: Callable[[float], bool], fitting: float) -> float:
    """The smallest number in [1, ``fitting``] that fits, where all above it do."""
    if fits(1.0):
        return 1.0
    failing = 1.0
    for _ in range(BISECTIONS):
        middle = (failing + fitting) / 2
        failing, fitting = (failing, middle) if fits(middle) else (middle, fitting)
    return fitting
