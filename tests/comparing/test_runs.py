"""Runs in processes of their own: finished once, never confused, failing loudly."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny import tiny_config

from recsys_basis.comparing.runs import PlannedRun, RunFailedError, make_runs
from recsys_basis.ingest.manifest import Manifest


def planned(prepared: Path, folder: Path, rule: str, *overrides: str) -> PlannedRun:
    config = tiny_config(prepared, folder / rule, f"row_optimizer={rule}", *overrides)
    return PlannedRun(rule, config, config.row_optimizer.learning_rate, Manifest.load(prepared).digest())


def test_finished_runs_are_not_made_again(prepared: Path, tmp_path: Path) -> None:
    runs = [planned(prepared, tmp_path, rule) for rule in ("sgd", "basis")]
    records = make_runs(runs[:1], 3200, 1, "first")
    before = (tmp_path / "sgd" / "result.json").stat().st_mtime_ns
    (tmp_path / "basis").mkdir()
    (tmp_path / "basis" / "metrics.jsonl").write_text("left by an interrupted run\n")
    records = make_runs(runs, 3200, 2, "second")
    assert (tmp_path / "sgd" / "result.json").stat().st_mtime_ns == before
    assert [record.variant for record in records] == ["sgd", "basis"]
    result = json.loads((tmp_path / "basis" / "result.json").read_text())
    assert records[1].metrics.auc == result["auc"] and records[1].optimizer_bytes == result["optimizer_bytes"]
    assert len(records[1].predictions()[0]) == 800
    assert "interrupted" not in (tmp_path / "basis" / "metrics.jsonl").read_text()


def test_another_run_in_the_folder_is_refused_by_key(prepared: Path, tmp_path: Path) -> None:
    make_runs([planned(prepared, tmp_path, "sgd")], 3200, 1, "first")
    with pytest.raises(RunFailedError, match="other batch_size"):
        make_runs([planned(prepared, tmp_path, "sgd", "batch_size=64")], 3200, 1, "second")
    with pytest.raises(RunFailedError, match="other data"):
        make_runs(
            [replace(planned(prepared, tmp_path, "sgd"), data_digest="of other rows")], 3200, 1, "third"
        )


def test_a_failing_run_stops_the_others_and_is_named(prepared: Path, tmp_path: Path) -> None:
    bad = planned(prepared, tmp_path, "adam", "embedding.kernel=fbgemm")
    long = planned(prepared, tmp_path, "sgd", "epochs=1000")
    with pytest.raises(RunFailedError, match=f"run {bad.folder}: .*no 'adam' on cpu"):
        make_runs([long, bad, planned(prepared, tmp_path, "basis")], 3200, 2, "first")
    assert not (tmp_path / "adam" / "result.json").exists()
    assert not (tmp_path / "sgd" / "result.json").exists()
    assert not (tmp_path / "basis").exists()
    assert not multiprocessing.active_children()


def test_a_diverging_run_is_an_outcome(prepared: Path, tmp_path: Path) -> None:
    wild = planned(prepared, tmp_path, "sgd", "row_optimizer.learning_rate=1e30")
    first, second = make_runs([wild, planned(prepared, tmp_path, "basis")], 3200, 2, "first")
    assert first is None and second is not None and second.variant == "basis"


COMPARISON = """
import pickle, sys
from recsys_basis.comparing.runs import make_runs
if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        make_runs(pickle.load(file), 3200, 2, "interrupted")
"""


def processes_of(group: int) -> set[int]:
    """Living processes of a process group."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" and int(own_group) == group:
            found.add(int(stat.parent.name))
    return found


def test_a_killed_comparison_leaves_no_process_and_no_finished_run(prepared: Path, tmp_path: Path) -> None:
    runs = [planned(prepared, tmp_path, rule, "epochs=100000") for rule in ("sgd", "basis")]
    (tmp_path / "runs.pickle").write_bytes(pickle.dumps(runs))
    (tmp_path / "comparison.py").write_text(COMPARISON)
    command = [sys.executable, str(tmp_path / "comparison.py"), str(tmp_path / "runs.pickle")]
    comparison = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        logs = [run.folder / "metrics.jsonl" for run in runs]
        wait_until(lambda: all(log.exists() and log.stat().st_size for log in logs))
        assert len(processes_of(comparison.pid)) >= 3
        comparison.kill()  # nothing of it can tidy up
        comparison.wait()
        wait_until(lambda: not processes_of(comparison.pid))
        assert not any(run.is_finished() for run in runs)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(comparison.pid, signal.SIGKILL)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
