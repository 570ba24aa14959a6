"""Training runs in processes of their own, several at a time, each finished once.

A process for each run keeps peak memory apart and lets one run fail alone. A fork server imports
torch and TorchRec once for all of them.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tqdm import tqdm

from recsys_basis.errors import UserError
from recsys_basis.metrics.click import ClickMetrics
from recsys_basis.report.records import RunRecord
from recsys_basis.training.loop import run_training
from recsys_basis.training.spec import TrainConfig


@dataclass(frozen=True)
class PlannedRun:
    """One run to make: ``config.output_dir`` is its folder."""

    variant: str
    config: TrainConfig
    learning_rate: float

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    def is_finished(self) -> bool:
        """Whether the folder holds this very run, ended. Raises UserError if it holds another one."""
        if not (self.folder / "result.json").is_file():
            return False
        saved = OmegaConf.to_container(OmegaConf.load(self.folder / "config.yaml"))
        wanted = self.config.model_dump(mode="json")
        assert isinstance(saved, dict)
        differing = sorted(key for key in wanted if saved.get(key) != wanted[key])
        if differing:
            raise UserError(
                f"{self.folder} holds a finished run with another {', '.join(differing)}: choose another "
                "output_dir, or remove that folder"
            )
        return True

    def record(self) -> RunRecord:
        """The finished run."""
        result = json.loads((self.folder / "result.json").read_text())
        metrics = ClickMetrics(**{field.name: result[field.name] for field in fields(ClickMetrics)})
        names = (
            "optimizer_bytes",
            "dense_optimizer_bytes",
            "weight_bytes",
            "rows_per_second",
            "peak_memory_bytes",
            "loss_jitter",
        )
        return RunRecord(
            variant=self.variant,
            seed=self.config.seed,
            learning_rate=self.learning_rate,
            metrics=metrics,
            run_dir=self.folder,
            **{name: result[name] for name in names},
        )


def make_runs(runs: Sequence[PlannedRun], rows_per_run: int, parallel: int, title: str) -> list[RunRecord]:
    """Train what is not finished yet, ``parallel`` at a time, under one progress bar in rows.

    The first failure stops the others and is raised; finished runs stay and are not made again.
    """
    missing = [run for run in runs if not run.is_finished()]
    for run in missing:
        shutil.rmtree(run.folder, ignore_errors=True)  # what an interrupted run left
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recsys_basis.training.loop"])
    rows_done = context.Value("q", 0)
    with (
        ProcessPoolExecutor(parallel, context, _keep_counter, (rows_done,), max_tasks_per_child=1) as pool,
        tqdm(
            desc=title, total=len(missing) * rows_per_run, unit="row", unit_scale=True, mininterval=0.5
        ) as bar,
    ):
        waiting = {pool.submit(_train, run.config) for run in missing}
        while waiting:
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
            bar.update(rows_done.value - bar.n)
            bar.set_postfix_str(f"{len(missing) - len(waiting)}/{len(missing)} runs done", refresh=False)
            failed = next((future for future in done if future.exception()), None)
            if failed is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                failed.result()
    return [run.record() for run in runs]


_rows_done: Any = None
"""Rows trained by all runs so far: memory that this worker shares with the main process."""


def _keep_counter(rows_done: Any) -> None:
    global _rows_done
    _rows_done = rows_done


def _train(config: TrainConfig) -> None:
    run_training(config, _count_rows)


def _count_rows(rows: int) -> None:
    with _rows_done.get_lock():
        _rows_done.value += rows
