"""The comparison as a table for people: in a terminal, in a log file, in Markdown."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from recsys_basis.report.comparison import VariantRow

MAX_WIDTH = 400
"""Characters a line may take. Far more than the table needs, so that no number is folded or cut."""


NO_WORSE = {
    (None, None): "-",
    (True, True): "yes",
    (False, False): "not shown",
    (True, False): "by bootstrap",
    (False, True): "by DeLong",
}
"""What (non_inferior, delong_non_inferior) read as."""


def print_comparison(
    rows: Sequence[VariantRow], title: str, baseline: str, file: TextIO | None = None
) -> None:
    """Print the table to ``file`` (default: stdout): 200 characters wide, wrapped by a narrow terminal."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    _fill(table, rows, baseline)
    Console(file=file or sys.stdout, width=MAX_WIDTH).print(table)


def comparison_markdown(rows: Sequence[VariantRow], baseline: str) -> str:
    """The same table as Markdown."""
    table = Table(box=box.MARKDOWN)
    _fill(table, rows, baseline)
    text = io.StringIO()
    Console(file=text, width=MAX_WIDTH).print(table)
    return text.getvalue().strip()


def _fill(table: Table, rows: Sequence[VariantRow], baseline: str) -> None:
    for heading in headings(baseline):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in rows:
        table.add_row(*cells(row), style="bold" if row.variant == baseline else "")


def headings(baseline: str) -> list[str]:
    """Of the columns of ``cells``."""
    return [
        "variant",
        "seeds",
        "lr",
        "AUC ± s.d.",
        "log loss",
        "NE",
        "calib.",
        "row state",
        "tower state",
        "rows/s",
        "memory",
        "jitter",
        f"AUC - {baseline}",
        "95 % bootstrap",
        "95 % DeLong",
        "no worse",
    ]


def cells(row: VariantRow) -> list[str]:
    """One line of the table."""
    return [
        row.variant,
        str(len(row.seeds)),
        f"{row.learning_rate:g}",
        f"{row.auc_mean:.5f}" + ("" if row.auc_std is None else f" ± {row.auc_std:.5f}"),
        f"{row.log_loss_mean:.5f}",
        f"{row.ne_mean:.5f}",
        f"{row.calibration_mean:.3f}",
        decimal(row.optimizer_bytes),
        decimal(row.dense_optimizer_bytes),
        "-" if row.rows_per_second is None else f"{row.rows_per_second:,.0f}",
        decimal(row.peak_memory_bytes),
        "-" if row.loss_jitter_mean is None else f"{row.loss_jitter_mean:.4f}",
        "-" if row.auc_difference is None else f"{row.auc_difference:+.5f}",
        "-" if row.ci_low is None else f"{row.ci_low:+.5f} to {row.ci_high:+.5f}",
        "-" if row.delong_ci_low is None else f"{row.delong_ci_low:+.5f} to {row.delong_ci_high:+.5f}",
        NO_WORSE[row.non_inferior, row.delong_non_inferior],
    ]
