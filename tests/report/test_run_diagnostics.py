"""The reading of a run's diagnostics names what is out of bounds, and only that."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from rich.console import Console

from recsys_basis.report.run_diagnostics import (
    NoDiagnosticsError,
    describe_run,
    over_steps,
    plot_reports,
    readings,
)

SOUND: dict[str, Any] = {
    "rows_touched": 72,
    "update_to_weight": 0.01,
    "state": {"second_moment": {"smallest": 1e-9, "largest": 1e-3, "underflowed": 0.0}},
    "buckets": 52,
    "bucket_load_mean": 100.0,
    "bucket_load_max_over_mean": 1.01,
    "fullest_buckets": [{"bucket": 17, "rows": 101, "ids": [1, 2]}],
    "hottest": {"bucket": 17, "ids": [0, 4], "of": 10},
    "collision_rate": 0.5,
    "scalar": {"p1": 0.1, "p25": 0.5, "p50": 1.0, "p75": 2.0, "p99": 9.0, "at_min": 0.02, "at_max": 0.02},
    "widest_buckets": [{"bucket": 3, "spread": 50.0, "ids": [8, 9]}],
}
PLAIN: dict[str, Any] = {"rows_touched": 9, "update_to_weight": 0.02, "state": {}}


def test_nothing_out_of_bounds_says_nothing() -> None:
    assert list(readings({"C1": SOUND, "C2": PLAIN})) == []


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("scalar.at_max", 0.14, "eta_s too large, or scalar_min and scalar_max too near: 16% of scalars"),
        ("update_to_weight", 1.5, "C3: a step changes touched rows by 1.5 times their size"),
        ("update_to_weight", 1e-6, "C3: a step changes touched rows by 1e-06 of their size"),
        ("state.second_moment.underflowed", 0.2, "C3: 20% of second_moment is zero or below"),
        ("bucket_load_max_over_mean", 3.0, "C3: bucket 17 holds 101 rows, 3.0 times the mean"),
        ("hottest.ids", list(range(9)), "C3: bucket 17 holds 9 of the 10 hottest rows (ids 0, 1, 2,"),
        ("widest_buckets", [{"bucket": 3, "spread": 2e4, "ids": [8]}], "C3: within bucket 3 the largest"),
        ("buckets", 1, "C3: all rows share a single bucket"),
    ],
)
def test_each_fault_is_named_with_its_number(path: str, value: object, words: str) -> None:
    values = copy.deepcopy(SOUND)
    *parents, last = path.split(".")
    place = values
    for key in parents:
        place = place[key]
    place[last] = value
    (sentence,) = readings({"C3": values})
    assert sentence.startswith(words)


def write(folder: Path, *reports: dict[str, Any]) -> None:
    (folder / "diagnostics.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports))


def test_a_run_in_words_table_and_picture(tmp_path: Path) -> None:
    worse = SOUND | {"update_to_weight": 2.0}
    write(
        tmp_path,
        {"step": 200, "seconds": 0.1, "tables": {"C1": worse}},
        {"step": 1400, "seconds": 0.1, "tables": {"C1": SOUND, "C2": PLAIN}},
    )
    with (tmp_path / "diagnostics.jsonl").open("a") as file:
        file.write('{"step": 1600, "tab')  # a run is writing it now
    sentences, table = describe_run(tmp_path)
    assert sentences == ["At step 1,400:", "Nothing stands out."]  # of the last whole report
    text = io.StringIO()
    Console(file=text, width=300).print(table)
    lines = {line.split()[0]: line.split() for line in text.getvalue().splitlines() if line.strip()}
    assert lines["C1"] == [
        "C1", "72", "1.00e-02", "50.0%", "52", "1.01", "0.1", "1", "9", "4.0%", "1.0e-09", "1.0e-03", "0.0%",
    ]  # fmt: skip
    assert lines["C2"] == ["C2", "9", "2.00e-02", *10 * ["-"]]
    assert matplotlib.image.imread(tmp_path / "diagnostics.png").shape[2] == 4


def test_curves_are_medians_over_the_tables_that_have_them() -> None:
    reports = [
        {"step": 1, "tables": {"C1": SOUND, "C2": PLAIN, "C3": PLAIN}},
        {"step": 2, "tables": {"C2": PLAIN}},
    ]
    assert over_steps(reports, "scalar", "p99") == ([1], [[9.0]])
    assert over_steps(reports, "update_to_weight") == ([1, 2], [[0.01, 0.02, 0.02], [0.02]])
    updates, collisions, scalars = plot_reports(reports).axes
    assert updates.lines[0].get_xydata().tolist() == [[1, 0.02], [2, 0.02]]
    assert collisions.lines[0].get_xydata().tolist() == [[1, 0.5]]
    assert [line.get_label() for line in scalars.lines] == ["p1", "p25", "p50", "p75", "p99"]
    *_, scalars = plot_reports(reports[1:]).axes
    assert not scalars.lines


def test_a_run_without_diagnostics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoDiagnosticsError, match="diagnostics_every_steps"):
        describe_run(tmp_path)
    write(tmp_path, {"step": 5, "seconds": 0.0, "tables": {}})
    with pytest.raises(NoDiagnosticsError, match="fbgemm"):
        describe_run(tmp_path)
