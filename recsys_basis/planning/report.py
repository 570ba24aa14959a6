"""A plan as tables for people: what each table costs and where it goes, and what each optimizer needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table as Grid

from recsys_basis.embeddings.plan import TABLES_SHARE
from recsys_basis.planning.placement import (
    Placement,
    Rules,
    fewest_ranks,
    place,
    table_state_bytes,
    weight_bytes,
)
from recsys_basis.planning.spec import PlanConfig
from recsys_basis.tables import Table

MAX_WIDTH = 400
"""Characters a line may take: far more than the tables need, so that no number is folded or cut."""


def print_plan(
    config: PlanConfig, tables: Sequence[Table], chosen: str, optimizers: Mapping[str, Rules]
) -> None:
    """Print both tables to stdout; ``chosen`` is the optimizer whose placement is shown."""
    placements = {name: place(config, tables, rules, config.world_size) for name, rules in optimizers.items()}
    console = Console(file=sys.stdout, width=MAX_WIDTH)
    console.print(_by_table(config, tables, chosen, optimizers, placements[chosen]))
    console.print(_by_optimizer(config, tables, optimizers, placements))


def _by_table(
    config: PlanConfig,
    tables: Sequence[Table],
    chosen: str,
    optimizers: Mapping[str, Rules],
    placement: Placement | None,
) -> Grid:
    grid = _grid(
        f"Bytes of weights and of optimizer state; places under {chosen} on {config.world_size} ranks",
        ["table"],
        ["ids", "weights", *optimizers],
        [f"place with {chosen}"],
    )
    largest = sorted(tables, key=lambda table: -table.num_rows)[: config.shown_tables]
    for table in (table for table in tables if table in largest):
        where = "does not fit" if placement is None else placement.where[table.name]
        grid.add_row(table.name, *_costs(config, [table], optimizers), where)
    rest = [table for table in tables if table not in largest]
    if rest:
        grid.add_row(f"{len(rest)} smaller", *_costs(config, rest, optimizers), "")
    grid.add_section()
    grid.add_row("all", *_costs(config, tables, optimizers), "")
    return grid


def _costs(config: PlanConfig, tables: Sequence[Table], optimizers: Mapping[str, Rules]) -> list[str]:
    return [
        f"{sum(table.num_ids for table in tables):,}",
        decimal(_weights(config, tables)),
        *(decimal(sum(table_state_bytes(rules, table) for table in tables)) for rules in optimizers.values()),
    ]


def _by_optimizer(
    config: PlanConfig,
    tables: Sequence[Table],
    optimizers: Mapping[str, Rules],
    placements: Mapping[str, Placement | None],
) -> Grid:
    grid = _grid(
        f"Ranks of {config.memory_gb:g} GB, {1 - TABLES_SHARE:.0%} of it kept for the rest of the model",
        ["optimizer"],
        ["state", "weights + state", f"fits on {config.world_size}", "fullest rank", "fewest ranks"],
        [],
    )
    weights = _weights(config, tables)
    for name, rules in optimizers.items():
        state = sum(table_state_bytes(rules, table) for table in tables)
        placement = placements[name]
        fewest = fewest_ranks(config, tables, rules)
        grid.add_row(
            name,
            decimal(state),
            decimal(weights + state),
            "no" if placement is None else "yes",
            "-" if placement is None else decimal(placement.fullest_rank_bytes),
            "no number" if fewest is None else str(fewest),
        )
    return grid


def _weights(config: PlanConfig, tables: Sequence[Table]) -> int:
    return sum(weight_bytes(config.embedding, table) for table in tables)


def _grid(title: str, left: list[str], right: list[str], last: list[str]) -> Grid:
    grid = Grid(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in left:
        grid.add_column(heading)
    for heading in right:
        grid.add_column(heading, justify="right")
    for heading in last:
        grid.add_column(heading)
    return grid
