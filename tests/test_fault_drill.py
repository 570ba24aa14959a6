"""The fault drill in short: two ranks killed at random moments end with the undisturbed run's bits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "fault_drill.py"
spec = importlib.util.spec_from_file_location("fault_drill", SCRIPT)
assert spec is not None and spec.loader is not None
fault_drill = importlib.util.module_from_spec(spec)
sys.modules["fault_drill"] = fault_drill  # processes of its own look it up there
spec.loader.exec_module(fault_drill)


def test_killed_runs_end_with_the_same_weights(prepared: Path, tmp_path: Path, monkeypatch: object) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)  # type: ignore[attr-defined]
    kills, verdicts = fault_drill.drill(prepared, tmp_path, ranks=2, kills=3, seed=1)
    assert len(kills) == 3 and sum(verdict.kills for verdict in verdicts) == 3
    assert any(kill.in_save for kill in kills)
    assert all(verdict.differing == () for verdict in verdicts)


def test_a_difference_is_found() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(2)}
    found = {"a": torch.tensor([0.0, 1e-30]), "c": torch.zeros(2)}
    assert fault_drill.differing_tensors(found, expected) == ("a", "b", "c")
