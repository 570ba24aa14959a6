"""The folder of a comparison: every file read back with a reader of its own."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import matplotlib.image
import pandas as pd
import pytest

from recsys_basis.report import writers
from recsys_basis.report.comparison import Judging, VariantRow, compare_runs
from recsys_basis.report.records import RunRecord
from recsys_basis.report.writers import write_comparison

JUDGING = Judging("adam", margin=0.0005, num_resamples=200)
FILES = {"comparison.csv", "comparison.json", "comparison.png", "README.md"}


@pytest.fixture
def rows(finished_run: Callable[..., RunRecord]) -> list[VariantRow]:
    runs = [finished_run("adam", seed) for seed in (0, 1)]
    runs += [finished_run("basis", seed, strength=0.9, optimizer_bytes=97_000) for seed in (0, 1)]
    runs += [finished_run("sgd", 0, strength=0.5, optimizer_bytes=0, rows_per_second=None)]
    return compare_runs(runs, JUDGING)


@pytest.fixture
def folder(rows: list[VariantRow], tmp_path: Path) -> Path:
    write_comparison(rows, tmp_path / "new" / "report", "a title", JUDGING)
    return tmp_path / "new" / "report"


def test_all_four_files_and_nothing_else(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES


def test_json_is_a_list_of_objects(folder: Path, rows: list[VariantRow]) -> None:
    adam, basis, sgd = json.loads((folder / "comparison.json").read_text())
    wanted = (
        "variant seeds learning_rate auc_mean auc_std log_loss_mean ne_mean calibration_mean optimizer_bytes "
        "rows_per_second peak_memory_bytes auc_difference ci_low ci_high"
    )
    assert set(wanted.split()) <= adam.keys()
    assert basis["seeds"] == [0, 1]
    assert basis["auc_mean"] == rows[1].auc_mean
    assert basis["ci_low"] < basis["auc_difference"] < basis["ci_high"] < 0
    assert (adam["auc_difference"], adam["ci_low"], adam["ci_high"]) == (None, None, None)
    assert (sgd["auc_std"], sgd["rows_per_second"], sgd["optimizer_bytes"]) == (None, None, 0)


def test_csv_holds_the_same(folder: Path) -> None:
    table = json.loads((folder / "comparison.json").read_text())
    with (folder / "comparison.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == [field.name for field in fields(VariantRow)] == list(table[0])
    assert [line["seeds"] for line in lines] == ["0 1", "0 1", "0"]
    assert (lines[0]["auc_difference"], lines[2]["auc_std"]) == ("", "")
    frame = pd.read_csv(folder / "comparison.csv", dtype={"seeds": str})
    assert frame["auc_mean"].tolist() == pytest.approx([row["auc_mean"] for row in table], rel=1e-15)
    assert float(lines[1]["auc_mean"]) == table[1]["auc_mean"]


def test_png_can_be_read(folder: Path) -> None:
    height, width, _ = matplotlib.image.imread(folder / "comparison.png").shape
    assert (height, width) == (840, 1350)


def test_readme_explains_every_file_and_column(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert text.startswith("# a title\n")
    for name in (FILES - {"README.md"}) | {field.name for field in fields(VariantRow)}:
        assert f"- `{name}`: " in text
    assert "| basis " in text


def test_a_failing_plot_leaves_the_old_one(
    folder: Path, rows: list[VariantRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "comparison.png").read_bytes()

    def fail(rows: object, path: Path, *rest: object) -> None:
        path.write_bytes(b"half a picture")
        raise OSError("full disk")

    monkeypatch.setattr(writers, "plot_comparison", fail)
    with pytest.raises(OSError, match="full disk"):
        write_comparison(rows, folder, "a title", JUDGING)
    assert (folder / "comparison.png").read_bytes() == before
    assert {path.name for path in folder.iterdir()} == FILES
