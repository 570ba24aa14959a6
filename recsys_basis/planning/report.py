"""A plan as tables for people: what each table costs and where it goes, and what each optimizer needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table as Grid

from recsys_basis.embeddings.plan import TABLES_SHARE
from recsys_basis.planning.placement import Placement, Rules, fewest_ranks, place_anyhow
from recsys_basis.planning.spec import PlanConfig
from recsys_basis.tables import Table

MAX_WIDTH = 400
"""Characters a line may take: far more than the tables need, so that no number is folded or cut."""


def print_plan(
    config: PlanConfig, tables: Sequence[Table], chosen: str, optimizers: Mapping[str, Rules]
) -> None:
    """Print both tables to stdout; ``chosen`` is the optimizer whose placement is shown."""
    placements = {name: place_anyhow(config, tables, rules) for name, rules in optimizers.items()}
    console = Console(file=sys.stdout, width=MAX_WIDTH)
    console.print(_by_table(config, tables, chosen, placements))
    console.print(_by_optimizer(config, tables, optimizers, placements))


def _by_table(
    config: PlanConfig,
    tables: Sequence[Table],
    chosen: str,
    placements: Mapping[str, Placement],
) -> Grid:
    grid = _grid(
        f"Bytes of weights and of optimizer state; places under {chosen} on {config.world_size} ranks",
        ["table"],
        ["ids", "weights", *placements],
        [f"place with {chosen}"],
    )
    largest = sorted(tables, key=lambda table: -table.num_rows)[: config.shown_tables]
    place = placements[chosen]
    for table in (table for table in tables if table in largest):
        where = place.where[table.name] if place.fits else "does not fit"
        grid.add_row(table.name, *_costs([table], chosen, placements), where)
    rest = [table for table in tables if table not in largest]
    if rest:
        grid.add_row(f"{len(rest)} smaller", *_costs(rest, chosen, placements), "")
    grid.add_section()
    grid.add_row("all", *_costs(tables, chosen, placements), "")
    return grid


def _costs(tables: Sequence[Table], chosen: str, placements: Mapping[str, Placement]) -> list[str]:
    return [
        f"{sum(table.num_ids for table in tables):,}",
        decimal(sum(placements[chosen].weight_bytes[table.name] for table in tables)),
        *(decimal(sum(each.state_bytes[table.name] for table in tables)) for each in placements.values()),
    ]


def _by_optimizer(
    config: PlanConfig,
    tables: Sequence[Table],
    optimizers: Mapping[str, Rules],
    placements: Mapping[str, Placement],
) -> Grid:
    grid = _grid(
        f"Ranks of {config.memory_gb:g} GB, {1 - TABLES_SHARE:.0%} of it kept for the rest of the model",
        ["optimizer"],
        ["state", "weights + state", f"fits on {config.world_size}", "fullest rank", "fewest ranks"],
        [],
    )
    for name, rules in optimizers.items():
        placement = placements[name]
        weights, state = (sum(each.values()) for each in (placement.weight_bytes, placement.state_bytes))
        fewest = fewest_ranks(config, tables, rules)
        grid.add_row(
            name,
            decimal(state),
            decimal(weights + state),
            "yes" if placement.fits else "no",
            decimal(placement.fullest_rank_bytes) if placement.fits else "-",
            "no number" if fewest is None else str(fewest),
        )
    return grid


def _grid(title: str, left: list[str], right: list[str], last: list[str]) -> Grid:
    grid = Grid(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in left:
        grid.add_column(heading)
    for heading in right:
        grid.add_column(heading, justify="right")
    for heading in last:
        grid.add_column(heading)
    return grid
