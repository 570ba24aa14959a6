"""The printed table: whole numbers in a pipe, style in a terminal, and valid Markdown."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from recsys_basis.report.comparison import Judging, VariantRow, compare_runs
from recsys_basis.report.records import RunRecord
from recsys_basis.report.table import comparison_markdown, print_comparison


@pytest.fixture
def rows(finished_run: Callable[..., RunRecord]) -> list[VariantRow]:
    runs = [finished_run("adam", seed) for seed in (0, 1)]
    runs += [finished_run("partial_rowwise_adam", 0, optimizer_bytes=0, rows_per_second=None)]
    return compare_runs(runs, Judging("adam", margin=0.0005, num_resamples=200))


def _cells(row: VariantRow) -> list[str]:
    return [
        f"{row.auc_mean:.5f}",
        f"{row.log_loss_mean:.5f}",
        f"{row.ne_mean:.5f}",
        f"{row.calibration_mean:.3f}",
    ]


def test_a_pipe_gets_every_number_on_one_plain_line(
    rows: list[VariantRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    file = io.StringIO()
    print_comparison(rows, "a title", "adam", file)
    text = file.getvalue()
    assert text.startswith("a title")
    assert not {"\x1b", "…"} & set(text)
    adam = next(line for line in text.splitlines() if line.strip().startswith("adam"))
    other = next(line for line in text.splitlines() if line.strip().startswith("partial_rowwise_adam"))
    assert all(
        cell in adam
        for cell in [*_cells(rows[0]), f"± {rows[0].auc_std:.5f}", "9.7 MB", "30,500", "900.0 MB"]
    )
    bootstrap, delong = (
        f"{low:+.5f} to {high:+.5f}"
        for low, high in ((rows[1].ci_low, rows[1].ci_high), (rows[1].delong_ci_low, rows[1].delong_ci_high))
    )
    interval = f"{rows[1].auc_difference:+.5f}  {bootstrap}  {delong}"
    assert all(cell in other for cell in [*_cells(rows[1]), "0 bytes", interval])
    assert max(map(len, text.splitlines())) < 210


def test_stdout_by_default(rows: list[VariantRow], capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(rows, "a title", "adam")
    assert "AUC - adam" in capsys.readouterr().out


def test_markdown_lines_have_equal_cells(rows: list[VariantRow]) -> None:
    lines = comparison_markdown(rows, "adam").splitlines()
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {17}
    assert all(line.startswith("|") and line.endswith("|") for line in lines)
    assert set(lines[1]) <= set("|-: ")
    assert lines[2].split("|")[1].strip() == "adam"
