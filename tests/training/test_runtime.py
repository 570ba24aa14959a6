"""Runs after each other in the processes of the same ranks: what one leaves behind is nothing to the next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.tiny import tiny_config

from recsys_basis.checkpoints.save import CheckpointSaver
from recsys_basis.errors import NonFiniteError
from recsys_basis.schema import ConfigError
from recsys_basis.training.loop import run_training
from recsys_basis.training.runtime import RuntimeConfig, start_runtime

RUNTIME = RuntimeConfig(device="cpu", threads_per_rank=1, collective_timeout_s=60)


def sums_of_runs() -> list[float]:
    """Sums over ranks in runs that keep their group, as the traceback of an error would, and in one more."""
    kept, sums = [], []
    for run in range(6):
        config = RUNTIME.model_copy(update={"collective_timeout_s": 30 + run % 2})
        with start_runtime(config) as runtime:
            total = torch.tensor([float(runtime.rank + run)])
            dist.all_reduce(total)
            sums.append(float(total))
            kept.append(dist.group.WORLD)
    return sums


def test_ranks_find_each_other_again() -> None:
    assert run_ranks(2, sums_of_runs) == [[1.0 + 2 * run for run in range(6)]] * 2


def aucs_after_failures(prepared: Path, folder: Path) -> list[float]:
    """Of whole runs, each after one that failed: at building, at a step, in a save."""
    aucs, errors = [], []

    def fail_to_write(*_: object) -> None:
        raise OSError("the disk is gone")

    write = CheckpointSaver._write
    for name, error, override in (
        ("build", ConfigError, "schedule.warmup_steps=1000"),
        ("step", NonFiniteError, "row_optimizer.learning_rate=1e30"),
        ("save", OSError, "checkpoint_every_steps=2"),
    ):
        CheckpointSaver._write = fail_to_write if name == "save" else write  # type: ignore[method-assign]
        with pytest.raises(error) as raised:
            run_training(tiny_config(prepared, folder / name, override, "max_train_rows=500"))
        errors.append(raised.value)
        CheckpointSaver._write = write  # type: ignore[method-assign]
        result = run_training(tiny_config(prepared, folder / f"after-{name}", "max_train_rows=500"))
        if os.environ["RANK"] == "0":
            assert result is not None
            aucs.append(result["auc"])
    return aucs


def test_a_run_after_a_failed_one_is_as_any_other(prepared: Path, tmp_path: Path) -> None:
    aucs = run_ranks(2, aucs_after_failures, prepared, tmp_path)[0]
    assert len(aucs) == 3 and len(set(aucs)) == 1
