"""The comparison as one HTML file that needs nothing beside it: words, table, pictures, configs, versions."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from recsys_basis.atomic import written_whole
from recsys_basis.comparing.search import SearchedRate
from recsys_basis.report.comparison import Judging, VariantRow
from recsys_basis.report.curves import plot_learning, plot_search
from recsys_basis.report.records import RunRecord
from recsys_basis.report.table import cells, headings
from recsys_basis.report.words import headlines

TEMPLATE = Path(__file__).with_name("report.html.jinja")
OF_THE_RUN = {"seed", "output_dir"}
"""Config keys that name a run, not its variant."""
ABSENT = "-"


@dataclass(frozen=True)
class Comparison:
    """All that the report tells of."""

    title: str
    rows: Sequence[VariantRow]
    records: Sequence[RunRecord]
    searched: Sequence[SearchedRate]
    judging: Judging
    command: str
    notes: Sequence[str]


def write_html(comparison: Comparison, folder: Path) -> None:
    """Write report.html into ``folder``, which holds comparison.png."""
    rows, judging = comparison.rows, comparison.judging
    first_run = {record.variant: record.run_dir for record in reversed(comparison.records)}
    configs = {row.variant: read_config(first_run[row.variant]) for row in rows}
    pictures = {
        "frontier": _as_uri((folder / "comparison.png").read_bytes()),
        "learning": _picture(plot_learning(comparison.records)),
        "search": _picture(plot_search(comparison.searched)) if comparison.searched else None,
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        comparison=comparison,
        headlines=headlines(rows, judging),
        headings=headings(judging.baseline),
        lines=[(row.variant == judging.baseline, cells(row)) for row in rows],
        pictures=pictures,
        differences=config_differences(configs, judging.baseline),
        configs={name: OmegaConf.to_yaml(OmegaConf.create(config)) for name, config in configs.items()},
        environment=merge_environments([record.run_dir for record in comparison.records]),
    )
    with written_whole(folder / "report.html") as path:
        path.write_text(text, encoding="utf-8")


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved config of a run without what names the run."""
    config = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items() if key not in OF_THE_RUN}


def config_differences(
    configs: dict[str, dict[str, Any]], baseline: str
) -> dict[str, list[tuple[str, str, str]]]:
    """For each variant but the baseline, (dotted key, the baseline's value, its own) where they differ."""
    if baseline not in configs:
        return {}
    base = dict(_flat(configs[baseline]))
    differences = {}
    for name, config in configs.items():
        own = dict(_flat(config))
        if name != baseline:
            differences[name] = [
                (key, base.get(key, ABSENT), own.get(key, ABSENT))
                for key in dict.fromkeys([*own, *base])
                if base.get(key, ABSENT) != own.get(key, ABSENT)
            ]
    return differences


def merge_environments(run_dirs: Sequence[Path]) -> dict[str, str]:
    """What environment.json of the runs says, by dotted key; runs that differ give all their values."""
    found: dict[str, list[str]] = {}
    for run_dir in run_dirs:
        for key, value in _flat(json.loads((run_dir / "environment.json").read_text())):
            if key != "command" and value not in found.setdefault(key, []):
                found[key].append(value)
    return {key: " | ".join(values) for key, values in found.items()}


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, value as text) of all leaves."""
    leaves: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            leaves += _flat(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", str(value)))
    return leaves


def _picture(figure: Figure) -> str:
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return _as_uri(png.getvalue())


def _as_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
