"""A run's diagnostics.jsonl in plain words, as a table, and as a picture.

Each reading states a rule of thumb beside the number that it rests on; what is within bounds is not named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from recsys_basis.atomic import written_whole
from recsys_basis.diagnostics.merging import PERCENTILES
from recsys_basis.errors import UserError
from recsys_basis.report.curves import dress
from recsys_basis.report.records import whole_lines

AT_BOUND_SHARE = 0.05
"""Scalars at a clip bound above which the bound, not the gradient, decides many rows' steps."""
UNDERFLOWED_SHARE = 0.01
"""Entries below the dtype's normal range above which steps of such rows cannot be trusted."""
LOAD_RATIO = 2.0
"""Largest bucket over the mean above which the hash shares badly."""
CROWDED_IDS = 3
"""So many of a table's ten commonest ids in one bucket mix their moments in most steps."""
WIDE_SPREAD = 1e4
"""Largest over smallest scalar within a bucket above which its rows have little in common."""
LARGE_UPDATE, SMALL_UPDATE = 1.0, 1e-5
"""Change over weight of the rows that a step touches: above, they are overwritten; below, they stand."""

Tables = dict[str, dict[str, Any]]


class NoDiagnosticsError(UserError):
    """The folder holds no report; the message says why that may be."""


def describe_run(folder: Path) -> tuple[list[str], Table]:
    """(what the last report says in sentences, its numbers by table); writes diagnostics.png into ``folder``.

    Raises NoDiagnosticsError where the run left no report.
    """
    reports = read_reports(folder)
    with written_whole(folder / "diagnostics.png") as path:
        plot_reports(reports).savefig(path, format="png")
    last = reports[-1]
    sentences = list(readings(last["tables"])) or ["Nothing stands out."]
    return [f"At step {last['step']:,}:", *sentences], as_table(last["tables"])


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports of a run that name at least one table, in the order of their steps."""
    path = folder / "diagnostics.jsonl"
    lines = whole_lines(path) if path.is_file() else []
    reports = [report for report in map(json.loads, lines) if report["tables"]]
    if not reports:
        raise NoDiagnosticsError(
            f"{folder} holds no diagnostics: train with diagnostics_every_steps, and with embedding.kernel "
            "other than fbgemm"
        )
    return reports


def readings(tables: Tables) -> Iterator[str]:
    """A sentence for each thing that is out of bounds, of all tables, then of each."""
    at_min, at_max = (_of_scalars(tables, key) for key in ("at_min", "at_max"))
    if at_max + at_min > AT_BOUND_SHARE:
        side = "upper" if at_max > at_min else "lower"
        yield (
            f"eta_s too large, or scalar_min and scalar_max too near: {at_min + at_max:.0%} of scalars at a "
            f"bound, most at the {side} one."
        )
    alone = [name for name, values in tables.items() if values.get("buckets") == 1]
    if alone:
        yield f"{', '.join(alone)}: all rows share a single bucket; a smaller rows_per_bucket gives more."
    for name, values in tables.items():
        yield from _of_table(name, values)


def _of_table(name: str, values: dict[str, Any]) -> Iterator[str]:
    ratio = values.get("update_to_weight")
    if ratio is not None and ratio > LARGE_UPDATE:
        yield f"{name}: a step changes touched rows by {ratio:.2g} times their size: learning rate too large."
    if ratio is not None and ratio < SMALL_UPDATE:
        yield f"{name}: a step changes touched rows by {ratio:.1g} of their size: they hardly learn."
    for state, found in values["state"].items():
        if found["underflowed"] > UNDERFLOWED_SHARE:
            yield (
                f"{name}: {found['underflowed']:.0%} of {state} is zero or below its dtype's normal range: "
                "keep it in a wider one."
            )
    if values.get("bucket_load_max_over_mean", 0.0) > LOAD_RATIO:
        worst = values["fullest_buckets"][0]
        yield (
            f"{name}: bucket {worst['bucket']} holds {worst['rows']} rows, "
            f"{values['bucket_load_max_over_mean']:.1f} times the mean: hash=balanced shares evenly."
        )
    hottest = values.get("hottest")
    if hottest and values["buckets"] > 1 and len(hottest["ids"]) >= CROWDED_IDS:
        ids = ", ".join(map(str, hottest["ids"]))
        yield (
            f"{name}: bucket {hottest['bucket']} holds {len(hottest['ids'])} of the {hottest['of']} hottest "
            f"rows (ids {ids}): give them private buckets (head_rows), or another hash_seed."
        )
    for worst in values.get("widest_buckets", [])[:1]:
        if worst["spread"] > WIDE_SPREAD:
            yield (
                f"{name}: within bucket {worst['bucket']} the largest scalar (id {worst['ids'][0]}) is "
                f"{worst['spread']:.2g} times the smallest: its rows have little in common."
            )


def _of_scalars(tables: Tables, key: str) -> float:
    """Mean over tables of a share of their scalars; 0 where none has it."""
    shares = [values["scalar"][key] for values in tables.values() if key in values.get("scalar", {})]
    return sum(shares) / len(shares) if shares else 0.0


def as_table(tables: Tables) -> Table:
    """A line for each embedding table; "-" where the rule has no such thing."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = ("table", "rows", "update/weight", "collisions", "buckets", "load max/mean", "s 1 %", "s 50 %")
    for heading in (*headings, "s 99 %", "at bounds", "V smallest", "V largest", "underflow"):
        table.add_column(heading, justify="left" if heading == "table" else "right")
    for name, values in tables.items():
        scalar, second = values.get("scalar", {}), values["state"].get("second_moment", {})
        bounds = scalar["at_min"] + scalar["at_max"] if "at_min" in scalar else None
        underflow = max((each["underflowed"] for each in values["state"].values()), default=None)
        table.add_row(
            name,
            f"{values['rows_touched']:,}",
            _cell(values.get("update_to_weight"), ".2e"),
            _cell(values.get("collision_rate"), ".1%"),
            _cell(values.get("buckets"), ","),
            _cell(values.get("bucket_load_max_over_mean"), ".2f"),
            *(_cell(scalar.get(rank), ".3g") for rank in ("p1", "p50", "p99")),
            _cell(bounds, ".1%"),
            *(_cell(second.get(end), ".1e") for end in ("smallest", "largest")),
            _cell(underflow, ".1%"),
        )
    return table


def plot_reports(reports: list[dict[str, Any]]) -> Figure:
    """Over the steps: update over weight and collisions with their range over tables, and percentiles of s.

    Lines are medians over tables; a panel stays empty for a rule that has no such thing.
    """
    figure = Figure(figsize=(12.0, 3.6), dpi=110, layout="constrained")
    figure.suptitle("medians over tables, bands from the least to the largest", fontsize=10)
    updates, collisions, scalars = figure.subplots(1, 3)
    for axes, key in ((updates, "update_to_weight"), (collisions, "collision_rate")):
        steps, values = over_steps(reports, key)
        axes.plot(steps, [median(each) for each in values], marker="o", markersize=3)
        axes.fill_between(steps, list(map(min, values)), list(map(max, values)), alpha=0.2, linewidth=0)
    for key in (f"p{rank}" for rank in PERCENTILES):
        steps, values = over_steps(reports, "scalar", key)
        if steps:
            scalars.plot(steps, [median(each) for each in values], marker="o", markersize=3, label=key)
            scalars.set_yscale("log")
            scalars.legend(fontsize=8, frameon=False)
    dress(updates, "step", "update over weight")
    dress(collisions, "step", "share of touched rows that collide")
    dress(scalars, "step", "percentiles of the scalar s")
    return figure


def over_steps(reports: list[dict[str, Any]], *path: str) -> tuple[list[int], list[list[float]]]:
    """(steps [n], for each the values at ``path`` of those tables that have it)."""
    steps, found = [], []
    for report in reports:
        values = [value for each in report["tables"].values() if (value := _at(each, path)) is not None]
        if values:
            steps.append(report["step"])
            found.append(values)
    return steps, found


def _at(values: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        values = values.get(key, {})
    return values if isinstance(values, int | float) else None


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
