"""The plot: its scale follows the bytes, and its names can be read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from recsys_basis.report.comparison import Judging, VariantRow, compare_runs
from recsys_basis.report.plot import frontier, plot_comparison
from recsys_basis.report.records import RunRecord

DrawAxes = Callable[[Sequence[VariantRow]], Axes]


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DrawAxes:
    """Plot rows and return the axes that were saved."""
    saved = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **keywords: Any) -> None:
        saved.append(figure)
        save(figure, *arguments, **keywords)

    monkeypatch.setattr(Figure, "savefig", keep)

    def plot(rows: Sequence[VariantRow]) -> Axes:
        plot_comparison(rows, tmp_path / "plot.png", "a title", "adam")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        return saved[-1].axes[0]

    return plot


def _rows(
    finished_run: Callable[..., RunRecord], sizes: dict[str, int], num_seeds: int = 2
) -> list[VariantRow]:
    runs = [
        finished_run(variant, seed, optimizer_bytes=size)
        for variant, size in sizes.items()
        for seed in range(num_seeds)
    ]
    return compare_runs(runs, Judging("adam", margin=0.0005, num_resamples=200))


@pytest.mark.parametrize(
    ("sizes", "scale"),
    [
        ({"adam": 9_000_000, "basis": 90_000}, "log"),
        ({"adam": 9_000_000, "basis": 90_000, "sgd": 0}, "symlog"),
        ({"adam": 9_000_000, "adagrad": 4_500_000}, "linear"),
        ({"sgd": 0}, "linear"),
    ],
)
def test_scale_and_words(
    finished_run: Callable[..., RunRecord], draw: DrawAxes, sizes: dict[str, int], scale: str
) -> None:
    axes = draw(_rows(finished_run, sizes))
    assert axes.get_xscale() == scale
    assert axes.get_title(loc="left") == "a title"
    assert "bytes" in axes.get_xlabel()
    assert "mean ± s.d. of 2 seeds" in axes.get_ylabel()
    assert {text.get_text() for text in axes.texts} == sizes.keys()
    low, high = axes.get_xlim()
    assert all(low < size < high for size in sizes.values())


def test_points_and_bars_are_the_rows(finished_run: Callable[..., RunRecord], draw: DrawAxes) -> None:
    rows = _rows(finished_run, {"adam": 9_000_000, "basis": 90_000})
    axes = draw(rows)
    for row, container in zip(rows, axes.containers, strict=True):
        point, _, (bar,) = container.lines
        assert point.get_xydata().tolist() == [[row.optimizer_bytes, row.auc_mean]]
        (_, low), (_, high) = bar.get_segments()[0]
        assert (low, high) == pytest.approx((row.auc_mean - row.auc_std, row.auc_mean + row.auc_std))


def test_the_frontier_is_the_highest_auc_that_so_many_bytes_buy(
    finished_run: Callable[..., RunRecord], draw: DrawAxes
) -> None:
    rows = _rows(finished_run, {"adam": 9_000, "sgd": 0, "small": 90, "dear": 9_500, "same": 90})
    aucs = {"sgd": 0.70, "small": 0.78, "same": 0.75, "adam": 0.80, "dear": 0.79}
    rows = [replace(row, auc_mean=aucs[row.variant]) for row in rows]
    assert [row.variant for row in frontier(rows)] == ["sgd", "small", "adam"]
    (line,) = [line for line in draw(rows).lines if line.get_drawstyle() == "steps-post"]
    assert line.get_xydata().tolist() == [[0, 0.70], [90, 0.78], [9_000, 0.80]]


def test_one_seed_has_no_bar(finished_run: Callable[..., RunRecord], draw: DrawAxes) -> None:
    axes = draw(_rows(finished_run, {"adam": 9_000_000, "basis": 90_000}, num_seeds=1))
    assert "one seed" in axes.get_ylabel()
    assert not any(container.has_yerr for container in axes.containers)


def test_names_of_crowded_points_do_not_overlap(
    finished_run: Callable[..., RunRecord], draw: DrawAxes
) -> None:
    sizes = {
        "rowwise_adagrad": 300_000,  # in a column with the next two
        "basis": 301_000,
        "sm3": 303_000,
        "basis_of_200": 360_000,  # beside the column, at the height of the next
        "basis_of_100": 420_000,
        "sgd": 0,
        "adam": 9_700_000,
        "partial_rowwise_adam_with_a_long_name": 9_900_000,  # at the right edge
    }
    axes = draw(_rows(finished_run, sizes))
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    for first, second in itertools.combinations(boxes, 2):
        assert not first.overlaps(second)
    markers = [axes.transData.transform(container.lines[0].get_xydata()[0]) for container in axes.containers]
    for box, (x, y) in itertools.product(boxes, markers):
        assert not box.contains(x, y)
    frame = axes.bbox
    assert all(frame.contains(*corner) for box in boxes for corner in (box.p0, box.p1))
