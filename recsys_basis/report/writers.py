"""The comparison as files: comparison.csv, comparison.json, comparison.png, and a README.md about them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from recsys_basis.atomic import written_whole
from recsys_basis.report.comparison import Judging, VariantRow
from recsys_basis.report.plot import plot_comparison
from recsys_basis.report.table import comparison_markdown

README = """# {title}

{table}

## Files
- `report.html`: all of it on one page: what the numbers say, curves, the search, every config, versions.
- `comparison.csv`: one line a variant with the columns below; lists are separated by spaces.
- `comparison.json`: the same as a list of objects; lists are arrays, empty is null.
- `comparison.png`: AUC against bytes of optimizer state; bars are one standard deviation
  over seeds, the stepped line is the highest AUC that so many bytes buy.

## Columns
{columns}

## The intervals
`auc_difference` compares each variant with `{baseline}` on the same test rows, seed by seed. Both 95 %
intervals allow for both draws, of test rows and of seeds. An interval that holds 0 means that these runs do
not tell the two apart.

- *bootstrap* (`ci_low`, `ci_high`; the one to quote): {num_resamples:,} resamples of seeds and rows together,
  without a formula for how the two act. Where each run's own noise is most of it, it is up to 1.7 times too
  wide; where seeds differ much and are few, too narrow (five cover about 83 of 100 such cases, 15 cover 92).
- *DeLong* (`delong_ci_low`, `delong_ci_high`): DeLong's covariances of the AUCs of all runs for the rows, the
  spread of the differences for the seeds, together by Obuchowski and Rockette's method with Hillis's degrees
  of freedom. Covers about 95 of 100 with five seeds, 88 to 93 with two or three that differ much.

*No worse* means that the lower end is above -{margin:g} (`comparison.non_inferiority_margin`), and that no
seed is missing: where runs diverged, the others show nothing. `not shown` is not "worse": more seeds or more
test rows may show it.
"""


def write_comparison(rows: Sequence[VariantRow], folder: Path, title: str, judging: Judging) -> None:
    """Write the four files into ``folder``, made where missing; each is replaced whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(rows, folder / "comparison.csv")
    with written_whole(folder / "comparison.json") as path:
        text = json.dumps([asdict(row) for row in rows], indent=2, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    with written_whole(folder / "comparison.png") as path:
        plot_comparison(rows, path, title, judging.baseline)
    with written_whole(folder / "README.md") as path:
        columns = "\n".join(
            f"- `{column.name}`: {column.metadata['meaning']}." for column in fields(VariantRow)
        )
        table = comparison_markdown(rows, judging.baseline)
        text = README.format(title=title, table=table, columns=columns, **asdict(judging))
        path.write_text(text, encoding="utf-8")


def _write_csv(rows: Sequence[VariantRow], target: Path) -> None:
    with written_whole(target) as path, path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column.name for column in fields(VariantRow))
        for row in rows:
            writer.writerow(_csv_cell(value) for value in asdict(row).values())


def _csv_cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, tuple) else value
