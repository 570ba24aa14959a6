"""What a run says of its tables' optimizer state: from live tensors, the same on any number of ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.tiny import tiny_config

from recsys_basis.ingest.manifest import Manifest
from recsys_basis.schema import ConfigError
from recsys_basis.training.loop import run_training

SETTINGS = (
    "row_optimizer.rows_per_bucket=null",
    "row_optimizer.state_budget=20%",
    "table_row_optimizers={C3: adam, C1: {base: basis, rows_per_bucket: null, bucket_rows: 4}}",
)


def test_a_budget_holds_over_ranks_and_is_told(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_training(tiny_config(prepared, tmp_path / "1", *SETTINGS))
    words = capsys.readouterr().out
    described = json.loads((tmp_path / "1" / "row_state.json").read_text())
    assert result is not None
    assert result["optimizer_bytes"] == sum(table["bytes"] for table in described.values())

    rows = {name: table["rows"] for name, table in described.items()}
    assert set(rows) == set(Manifest.load(prepared).cardinalities)
    assert described["C3"] == {
        "rule": "adam",
        "rows": rows["C3"],
        "state_rows": {"first_moment": rows["C3"], "second_moment": rows["C3"], "updates": 1},
        "bytes": rows["C3"] * 2 * 8 * 4 + 8,
    }
    of_basis = {"second_moment": 4, "updates": 4, "energy": rows["C1"], "table_updates": 1}
    assert described["C1"]["state_rows"] == of_basis
    budgeted = {name: table for name, table in described.items() if name not in ("C1", "C3")}
    adam_bytes = sum(rows[name] for name in budgeted) * 2 * 8 * 4
    used = sum(table["bytes"] for table in budgeted.values())
    assert 0.19 * adam_bytes < used <= 0.2 * adam_bytes
    exact = [name for name, table in budgeted.items() if table["state_rows"]["second_moment"] == rows[name]]
    assert 0 < len(exact) < len(budgeted)
    assert f"adam: {rows['C3']:,} rows, " in words and "of state on C3\n" in words
    bucket_rows = sum(rows[name] for name in exact)
    assert f"basis: {bucket_rows:,} rows, {bucket_rows:,} bucket rows, " in words
    assert f"of state on {', '.join(exact)}\n" in words

    two_ranks = tiny_config(prepared, tmp_path / "2", *SETTINGS, "embedding.sharding=row_wise")
    run_ranks(2, run_training, two_ranks)
    assert json.loads((tmp_path / "2" / "row_state.json").read_text()) == described


def test_a_budget_that_cannot_be_met_stops_before_training(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state_budget = 1kB is 1,000 bytes.* at least"):
        run_training(tiny_config(prepared, tmp_path / "run", *SETTINGS, "row_optimizer.state_budget=1kB"))
    assert not (tmp_path / "run").exists()


def test_what_has_grown_is_told_at_the_end(prepared: Path, tmp_path: Path) -> None:
    """Each table doubles twice, as far as it has rows; the numbers of rows stay."""
    described = []
    for name, grow_at in (("fixed", "[]"), ("growing", "[3,24]")):
        settings = ("row_optimizer.rows_per_bucket=50", f"row_optimizer.grow_at={grow_at}")
        run_training(tiny_config(prepared, tmp_path / name, *settings))
        described.append(json.loads((tmp_path / name / "row_state.json").read_text()))
    for table, fixed in described[0].items():
        grown = described[1][table]
        factor = grown["state_rows"]["second_moment"] / fixed["state_rows"]["second_moment"]
        assert factor == (4 if fixed["rows"] >= 50 else min(4, 2 ** int(math.log2(fixed["rows"])))), table
        assert grown["state_rows"]["updates"] == grown["state_rows"]["second_moment"]
        assert (grown["rows"], grown["state_rows"]["energy"]) == (fixed["rows"], fixed["rows"])
