"""Training runs in processes of their own, several at a time, each finished once.

A process for each run keeps peak memory apart and lets one run fail alone. A fork server imports
torch and TorchRec once for all of them. However the comparison ends, its runs end with it: each watches
for that. A run counts as finished by its result.json, which is written last and whole.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tqdm import tqdm

from recsys_basis.errors import NonFiniteError, UserError
from recsys_basis.metrics.click import ClickMetrics
from recsys_basis.report.records import RunRecord
from recsys_basis.training.loop import run_training
from recsys_basis.training.spec import TrainConfig


class RunFailedError(UserError):
    """A run of a comparison cannot be made; the message names it and the reason."""


@dataclass(frozen=True)
class PlannedRun:
    """One run to make: ``config.output_dir`` is its folder."""

    variant: str
    config: TrainConfig
    learning_rate: float
    data_digest: str
    """Of the prepared rows (``Manifest.digest``)."""

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    def is_finished(self) -> bool:
        """Whether the folder holds this very run, ended. Raises RunFailedError if it holds another one."""
        if not (self.folder / "result.json").is_file():
            return False
        saved = OmegaConf.to_container(OmegaConf.load(self.folder / "config.yaml"))
        wanted = self.config.model_dump(mode="json")
        assert isinstance(saved, dict)
        # The machine's settings change no result but the speed.
        differing = sorted(key for key in wanted if key != "runtime" and saved.get(key) != wanted[key])
        if json.loads((self.folder / "result.json").read_text()).get("data_digest") != self.data_digest:
            differing.append("data")
        if differing:
            raise RunFailedError(
                f"{self.folder} holds a finished run with other {', '.join(differing)}: choose another "
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


Outcome = RunRecord | None
"""A finished run, or None for one that diverged."""


def make_runs(runs: Sequence[PlannedRun], rows_per_run: int, parallel: int, title: str) -> list[Outcome]:
    """Train what is not finished yet, ``parallel`` at a time, under one progress bar in rows.

    A run that diverges is an outcome: None. Any other failure stops the rest and is raised, naming the
    run; finished runs stay and are not made again.
    """
    diverged: set[Path] = set()
    missing = deque(run for run in runs if not run.is_finished())
    total = len(missing)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recsys_basis.training.loop"])
    rows_done = context.Value("q", 0)
    running: dict[int, RunningProcess] = {}
    with tqdm(desc=title, total=total * rows_per_run, unit="row", unit_scale=True, mininterval=0.5) as bar:
        try:
            while missing or running:
                while missing and len(running) < parallel:
                    process = RunningProcess.start(context, missing.popleft(), rows_done)
                    running[process.sentinel] = process
                for sentinel in wait(list(running), timeout=0.5):
                    assert isinstance(sentinel, int)
                    ended = running.pop(sentinel)
                    if ended.diverged():
                        diverged.add(ended.run.folder)
                bar.update(rows_done.value - bar.n)
                done = total - len(missing) - len(running)
                bar.set_postfix_str(f"{done}/{total} runs done", refresh=False)
        finally:
            for process in running.values():
                process.stop()
    return [None if run.folder in diverged else run.record() for run in runs]


@dataclass(frozen=True)
class RunningProcess:
    """A run and the process that makes it."""

    run: PlannedRun
    process: Any
    answer: Connection
    """Receives (kind, words) if the run fails."""

    @classmethod
    def start(cls, context: Any, run: PlannedRun, rows_done: Any) -> RunningProcess:
        shutil.rmtree(run.folder, ignore_errors=True)  # what an interrupted run left
        answer, question = context.Pipe(duplex=False)
        process = context.Process(target=_train, args=(run.config, rows_done, question), daemon=True)
        process.start()
        question.close()
        return cls(run, process, answer)

    @property
    def sentinel(self) -> int:
        return int(self.process.sentinel)

    def diverged(self) -> bool:
        """Of an ended process. Raises what made the run fail, naming its folder."""
        self.process.join()
        if self.process.exitcode == 0:
            return False
        try:
            kind, words = self.answer.recv()
        except EOFError:
            kind, words = "killed", f"its process ended with exit code {self.process.exitcode}"
        if kind == "diverged":
            return True
        if kind == "bug":
            raise RuntimeError(f"run {self.run.folder} failed:\n{words}")
        raise RunFailedError(f"run {self.run.folder}: {words}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()


def _train(config: TrainConfig, rows_done: Any, question: Connection) -> None:
    """Body of a run's process."""

    def count_rows(rows: int) -> None:
        with rows_done.get_lock():
            rows_done.value += rows

    threading.Thread(target=_end_with_the_comparison, daemon=True).start()
    os.environ.pop("RANK", None)  # of a launcher around the comparison: each run is a world of its own
    try:
        run_training(config, count_rows)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except NonFiniteError as error:
        question.send(("diverged", str(error)))
    except UserError as error:
        question.send(("refused", str(error)))
    except Exception:
        question.send(("bug", traceback.format_exc()))
    else:
        return
    raise SystemExit(1)


def _end_with_the_comparison() -> None:
    """Wait for the comparison's process to end, however it does, then end this one."""
    comparison = multiprocessing.parent_process()
    assert comparison is not None
    comparison.join()
    os._exit(1)
