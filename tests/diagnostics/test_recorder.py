"""A run reports at its interval and at its end, alike on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.tiny import tiny_config

from recsys_basis.training.loop import run_training


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]


def test_two_ranks_report_what_one_reports(prepared: Path, tmp_path: Path) -> None:
    settings = ("diagnostics_every_steps=10", "embedding.sharding=row_wise", "row_optimizer=basis_literal")
    run_training(tiny_config(prepared, tmp_path / "1", *settings))
    run_ranks(2, run_training, tiny_config(prepared, tmp_path / "2", *settings))
    alone, together = reports(tmp_path / "1"), reports(tmp_path / "2")
    assert [each["step"] for each in alone] == [each["step"] for each in together] == [10, 20, 25]
    assert alone[0]["tables"].keys() == together[0]["tables"].keys()
    assert len(alone[0]["tables"]) == 26 and alone[0]["seconds"] > 0
    for name, one in alone[0]["tables"].items():
        two = together[0]["tables"][name]
        for key in ("rows_touched", "buckets", "bucket_load_mean", "bucket_load_max_over_mean"):
            assert one[key] == two[key]
        assert one["hottest"] == two["hottest"]
        assert two["update_to_weight"] == pytest.approx(one["update_to_weight"], rel=1e-3)
        assert two["collision_rate"] == pytest.approx(one["collision_rate"])
        assert 0 <= one["scalar"]["at_max"] <= 1


def test_null_reports_nothing(prepared: Path, tmp_path: Path) -> None:
    run_training(tiny_config(prepared, tmp_path / "run", "diagnostics_every_steps=null"))
    assert reports(tmp_path / "run") == []
