"""The comparison as a picture: AUC against bytes of optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import EngFormatter, NullLocator
from matplotlib.transforms import Bbox

from recsys_basis.report.comparison import VariantRow

BASELINE_COLOR = "#c44e52"
VARIANT_COLOR = "#30588c"
FRONTIER_COLOR = "#8fb08c"
INK = "#333333"
FAINT = "#d9d9d9"

NAME_OFFSETS = [(10, 0), (-10, 0), (0, 13), (0, -13)] + [
    (side * 14, rise) for rise in (14, -14, 28, -28, 42, -42, 56, -56) for side in (1, -1)
]
"""Where a name may stand, in points right of and above its marker, the most wanted first."""
MARKER_RADIUS = 10.0
"""Half the square that names keep off around a marker, in pixels at the figure's 150 a inch."""


def plot_comparison(rows: Sequence[VariantRow], path: Path, title: str, baseline: str) -> None:
    """Draw ``rows`` into a PNG at ``path``: a named point a variant, bars of one s.d. over seeds.

    A line of steps marks the frontier: the highest AUC that so many bytes buy.
    """
    figure = Figure(figsize=(9.0, 5.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        is_baseline = row.variant == baseline
        axes.errorbar(
            row.optimizer_bytes,
            row.auc_mean,
            yerr=row.auc_std,
            fmt="D" if is_baseline else "o",
            color=BASELINE_COLOR if is_baseline else VARIANT_COLOR,
            markersize=7,
            capsize=3,
            elinewidth=1.2,
        )
        if is_baseline:
            axes.axhline(row.auc_mean, color=BASELINE_COLOR, linestyle=(0, (4, 4)), linewidth=1, zorder=1)
    best = frontier(rows)
    axes.plot(
        [row.optimizer_bytes for row in best],
        [row.auc_mean for row in best],
        color=FRONTIER_COLOR,
        drawstyle="steps-post",
        linewidth=1.5,
        zorder=1,
    )
    _scale_bytes(axes, [row.optimizer_bytes for row in rows])
    _label_axes(axes, rows, title)
    figure.draw_without_rendering()  # settles the layout, so that names can be placed in pixels
    _name_points(axes, rows, baseline)
    figure.savefig(path, format="png")


def frontier(rows: Sequence[VariantRow]) -> list[VariantRow]:
    """Variants that no other equals in AUC with fewer bytes, or beats with as many; by ascending bytes."""
    best: list[VariantRow] = []
    for row in sorted(rows, key=lambda row: (row.optimizer_bytes, -row.auc_mean)):
        if not best or row.auc_mean > best[-1].auc_mean:
            best.append(row)
    return best


def _scale_bytes(axes: Axes, sizes: Sequence[int]) -> None:
    """Logarithmic where sizes span a factor of ten; with a zero among them, linear below the smallest."""
    positive = [size for size in sizes if size > 0]
    if positive and len(positive) < len(sizes):
        axes.set_xscale("symlog", linthresh=min(positive), linscale=0.5)
    elif positive and max(positive) >= 10 * min(positive):
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.margins(x=0.12, y=0.15)


def _label_axes(axes: Axes, rows: Sequence[VariantRow], title: str) -> None:
    num_seeds = sorted({len(row.seeds) for row in rows})
    seeds = "one seed" if num_seeds == [1] else f"mean ± s.d. of {'/'.join(map(str, num_seeds))} seeds"
    axes.set_title(title, loc="left", color=INK, fontsize=12, pad=12)
    axes.set_xlabel("optimizer state of the embedding rows (bytes)", color=INK)
    axes.set_ylabel(f"AUC on the test rows ({seeds})", color=INK)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.tick_params(colors=INK)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _name_points(axes: Axes, rows: Sequence[VariantRow], baseline: str) -> None:
    """Write each variant's name by its marker, clear of markers, bars, lines and names where it can."""
    taken = [_marker_box(axes, row) for row in rows]
    for row in rows:
        if row.variant == baseline:
            height = axes.transData.transform((row.optimizer_bytes, row.auc_mean))[1]
            taken.append(Bbox.from_extents(axes.bbox.x0, height - 2, axes.bbox.x1, height + 2))
    for row in rows:
        boxes = [_measure_name(axes, row, offset) for offset in NAME_OFFSETS]
        best = min(range(len(boxes)), key=lambda index: _crowding(boxes[index], taken, axes.bbox))
        _write_name(axes, row, NAME_OFFSETS[best], line=all(NAME_OFFSETS[best]))
        taken.append(boxes[best])


def _measure_name(axes: Axes, row: VariantRow, offset: tuple[int, int]) -> Bbox:
    """The pixels that the name would take at ``offset``."""
    name = _write_name(axes, row, offset, line=False)
    box = name.get_window_extent()
    name.remove()
    return box


def _write_name(axes: Axes, row: VariantRow, offset: tuple[int, int], line: bool) -> Annotation:
    """The variant's name at ``offset`` from its marker, with or without a thin line between the two."""
    across, _ = offset
    name = axes.annotate(
        row.variant,
        (row.optimizer_bytes, row.auc_mean),
        xytext=offset,
        textcoords="offset points",
        ha="center" if across == 0 else "left" if across > 0 else "right",
        va="center",
        color=INK,
        fontsize=9,
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.5, "shrinkB": 5} if line else None,
    )
    name.set_in_layout(False)
    return name


def _marker_box(axes: Axes, row: VariantRow) -> Bbox:
    """The pixels of a marker and its bar."""
    spread = row.auc_std or 0.0
    (x, low), (_, high) = axes.transData.transform(
        [(row.optimizer_bytes, row.auc_mean - spread), (row.optimizer_bytes, row.auc_mean + spread)]
    )
    return Bbox.from_extents(x - MARKER_RADIUS, low - MARKER_RADIUS, x + MARKER_RADIUS, high + MARKER_RADIUS)


def _crowding(box: Bbox, taken: Sequence[Bbox], frame: Bbox) -> float:
    """Pixels of ``box`` that lie on something else or outside ``frame``."""
    return _area(box) - _overlap(box, frame) + sum(_overlap(box, other) for other in taken)


def _overlap(first: Bbox, second: Bbox) -> float:
    common = Bbox.intersection(first, second)
    return 0.0 if common is None else _area(common)


def _area(box: Bbox) -> float:
    return float(box.width * box.height)
