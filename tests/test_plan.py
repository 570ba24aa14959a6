"""The plan job, on MLPerf's tables and on a prepared folder; what it is asked must be clear."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recsys_basis.ingest.manifest import Manifest
from recsys_basis.plan import main
from recsys_basis.row_optimizers import ROW_OPTIMIZERS


def lines_of(text: str) -> dict[str, list[str]]:
    """First cell of each line to its cells."""
    cells = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {line[0]: line for line in cells}


def test_mlperf_tables_on_machines_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    command = "preset=criteo_terabyte_mlperf world_size=64 memory_gb=40 shown_tables=8 row_optimizer=adam"
    assert main(command.split()) == 0
    lines = lines_of(capsys.readouterr().out)
    headings = lines["table"]
    assert set(ROW_OPTIMIZERS) <= set(headings)
    everything = dict(zip(headings, lines["all"], strict=False))
    assert everything["ids"] == "204,184,588"
    # 204,184,588 rows of 128 floats, and padding to whole partitions
    assert everything["weights"] == "104.5 GB" and everything["adam"] == "209.1 GB"
    assert everything["rowwise_adagrad"] == "816.7 MB" and everything["sgd"] == "0 bytes"
    assert lines["C1"][-1] == "row_wise over 64 ranks"  # 61 GB do not fit whole
    assert [name for name in lines if re.fullmatch(r"C\d+", name)] == [
        "C1", "C10", "C11", "C12", "C20", "C21", "C22", "C23",
    ]  # fmt: skip
    assert lines["18 smaller"][1] == "121,198"
    assert lines["adam"][1:4] == ["209.1 GB", "313.6 GB", "yes"]


def test_what_does_not_fit_is_told_with_the_ranks_that_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("cardinalities=[1638400] world_size=1 memory_gb=0.2 row_optimizer=adam".split()) == 0
    lines = lines_of(capsys.readouterr().out)
    assert lines["C1"][-1] == "does not fit"
    assert lines["adam"][-3:] == ["no", "-", "2"]
    assert lines["sgd"][-3] == "yes" and lines["sgd"][-1] == "1"


def test_a_prepared_folder_knows_its_tables(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"prepared_dir={prepared}"]) == 0
    lines = lines_of(capsys.readouterr().out)
    cardinalities = Manifest.load(prepared).cardinalities
    assert {name: int(lines[name][1].replace(",", "")) for name in cardinalities} == cardinalities


def test_a_state_budget_is_solved_over_all_tables(capsys: pytest.CaptureFixture[str]) -> None:
    budget = "row_optimizer.rows_per_bucket=null row_optimizer.state_budget=4%"
    assert main(f"cardinalities=[200000,100,60000] {budget}".split()) == 0
    everything = lines_of(capsys.readouterr().out)["basis"]
    assert everything[1] == "1.3 MB"  # of Adam's 2 * 64 bytes for each of 260,100 rows, and padding


def test_tables_set_apart_have_their_own_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("cardinalities=[64000,640] row_optimizer=sgd table_row_optimizers={C2:adam}".split()) == 0
    lines = lines_of(capsys.readouterr().out)
    state = {name: dict(zip(lines["table"], lines[name], strict=False)) for name in ("C1", "C2", "all")}
    bytes_of_adam = "81.9 kB"  # two moments of 16 floats for each of 640 rows
    assert state["C1"]["as configured"] == "0 bytes" and state["C1"]["sgd"] == "0 bytes"
    assert state["C2"]["as configured"] == state["all"]["as configured"] == bytes_of_adam
    assert state["C1"]["adam"] == "8.2 MB"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("", "say which tables, once"),
        ("preset=criteo_terabyte_mlperf prepared_dir=data", "say which tables, once"),
        ("cardinalities=[0]", "cardinalities.0"),
        ("cardinalities=[]", "cardinalities"),
        ("cardinalities=[9] memory_gb=0.0", "memory_gb"),
        ("cardinalities=[9] world_size=0", "world_size"),
        ("prepared_dir=nowhere", "nowhere is not a prepared data set"),
        ("cardinalities=[9] embedding.table_sharding={C2:row_wise}", "names no table; they are C1"),
        ("cardinalities=[9] table_row_optimizers={C2:adam}", "names no table; they are C1"),
    ],
)
def test_unclear_questions_are_refused(command: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 1
    assert reason in capsys.readouterr().err
