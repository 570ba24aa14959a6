"""Curves over the steps of runs, and over the learning rates of a search, as matplotlib figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recsys_basis.comparing.search import SearchedRate
from recsys_basis.report.plot import FAINT, INK
from recsys_basis.report.records import RunRecord, whole_lines

SMOOTHING_SHARE = 0.15
"""Losses are means over this share of a run's logged steps: single batches hide the curve."""


def plot_learning(records: Sequence[RunRecord]) -> Figure:
    """Training loss over steps, smoothed, and AUC on the evaluated rows where it was taken on the way.

    A line a variant: the mean over those of its seeds that logged the step.
    """
    figure = Figure(figsize=(9.0, 3.8), dpi=110, layout="constrained")
    losses, aucs = figure.subplots(1, 2)
    for name in dict.fromkeys(record.variant for record in records):
        logs = [read_log(record.run_dir) for record in records if record.variant == name]
        steps, loss = mean_curve(logs, "train", "loss")
        losses.plot(steps, smooth(loss), label=name, linewidth=1.2)
        aucs.plot(*mean_curve(logs, "evaluation", "auc"), marker="o", markersize=4, label=name, linewidth=1.2)
    dress(losses, "step", "training loss, smoothed (nats a row)")
    dress(aucs, "step", "AUC on the evaluated rows")
    losses.legend(fontsize=8, frameon=False)
    return figure


def plot_search(searched: Sequence[SearchedRate]) -> Figure:
    """Holdout AUC over the learning rate: a line for each variant and round, a star at the chosen rate."""
    names = list(dict.fromkeys(each.variant for each in searched))
    figure = Figure(figsize=(9.0, 3.8), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    most_rows = max(each.train_rows for each in searched)
    for number, name in enumerate(names):
        for train_rows in sorted({each.train_rows for each in searched if each.variant == name}):
            tried = sorted(
                (each.learning_rate, each.auc_mean)
                for each in searched
                if (each.variant, each.train_rows) == (name, train_rows) and each.log_loss_mean is not None
            )
            whole = train_rows == most_rows
            label = name if whole else f"{name}, {train_rows:,} rows"
            style = "-" if whole else ":"
            axes.plot(*np.array(tried).reshape(-1, 2).T, f"{style}o", color=f"C{number % 10}", markersize=4,
                      linewidth=1.2, label=label)  # fmt: skip
        chosen = next(each for each in searched if each.variant == name and each.chosen)
        axes.plot(chosen.learning_rate, chosen.auc_mean, "*", color=f"C{number % 10}", markersize=14)
    axes.set_xscale("log")
    dress(axes, "learning rate", "AUC on the holdout (mean over search seeds)")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def read_log(run_dir: Path) -> list[dict[str, object]]:
    """The objects of a run's metrics.jsonl."""
    return [json.loads(line) for line in whole_lines(run_dir / "metrics.jsonl")]


def mean_curve(
    logs: Sequence[Sequence[dict[str, object]]], kind: str, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """(steps [n], values [n]): the mean over ``logs`` of ``name`` at each step that any of them logged."""
    by_step: dict[int, list[float]] = {}
    for log in logs:
        for line in log:
            if line["kind"] == kind:
                by_step.setdefault(int(str(line["step"])), []).append(float(str(line[name])))
    steps = sorted(by_step)
    return np.array(steps), np.array([np.mean(by_step[step]) for step in steps])


def smooth(values: np.ndarray) -> np.ndarray:
    """[n]: each value's mean with its neighbours, within a window that is cut off at the ends."""
    half = int(len(values) * SMOOTHING_SHARE / 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    last = np.minimum(np.arange(len(values)) + half + 1, len(values))
    first = np.maximum(np.arange(len(values)) - half, 0)
    return (sums[last] - sums[first]) / (last - first)


def dress(axes: Axes, across: str, up: str) -> None:
    """Name the axes, and keep to plain numbers and a faint grid."""
    axes.set_xlabel(across, color=INK)
    axes.set_ylabel(up, color=INK)
    if axes.get_yscale() == "linear":
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
