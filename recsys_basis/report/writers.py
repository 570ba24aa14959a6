"""The comparison as files: comparison.csv, comparison.json, comparison.png, and a README.md about them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from recsys_basis.atomic import written_whole
from recsys_basis.report.comparison import VariantRow
from recsys_basis.report.plot import plot_comparison
from recsys_basis.report.table import comparison_markdown

README = """# {title}

{table}

## Files
- `comparison.csv`: one line a variant with the columns below; lists are separated by spaces.
- `comparison.json`: the same as a list of objects; lists are arrays, empty is null.
- `comparison.png`: AUC against bytes of optimizer state; bars are one standard deviation over seeds.

## Columns
{columns}

## The interval
`auc_difference` compares each variant with `{baseline}` on the same test rows, seed by seed. Its 95 %
interval allows for both draws, of test rows (DeLong's covariances) and of seeds (Obuchowski and
Rockette's method with Hillis's degrees of freedom). An interval that holds 0 means that these runs do
not tell the two apart. With two or three seeds it may be somewhat too narrow; five or more are better.
"""


def write_comparison(rows: Sequence[VariantRow], folder: Path, title: str, baseline: str) -> None:
    """Write the four files into ``folder``, made where missing; each is replaced whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(rows, folder / "comparison.csv")
    with written_whole(folder / "comparison.json") as path:
        text = json.dumps([asdict(row) for row in rows], indent=2, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    with written_whole(folder / "comparison.png") as path:
        plot_comparison(rows, path, title, baseline)
    with written_whole(folder / "README.md") as path:
        columns = "\n".join(
            f"- `{column.name}`: {column.metadata['meaning']}." for column in fields(VariantRow)
        )
        table = comparison_markdown(rows, baseline)
        path.write_text(
            README.format(title=title, table=table, columns=columns, baseline=baseline), encoding="utf-8"
        )


def _write_csv(rows: Sequence[VariantRow], target: Path) -> None:
    with written_whole(target) as path, path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column.name for column in fields(VariantRow))
        for row in rows:
            writer.writerow(_csv_cell(value) for value in asdict(row).values())


def _csv_cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, tuple) else value
