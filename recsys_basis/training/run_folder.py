"""What a run leaves behind, and where."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
from omegaconf import OmegaConf
from torch.utils.tensorboard import SummaryWriter

from recsys_basis.atomic import written_whole
from recsys_basis.checkpoints.folder import drop_partial
from recsys_basis.report.records import whole_lines, write_predictions
from recsys_basis.schema import ConfigError
from recsys_basis.training.runtime import Runtime, from_main
from recsys_basis.training.spec import TrainConfig

README = """\
# One training run of recsys_basis

| file | what |
|---|---|
| config.yaml | the resolved config: every key that decided this run |
| environment.json | versions, machine, threads, git commit, command |
| row_state.json | rule, rows, bucket rows and bytes of optimizer state of each table |
| metrics.jsonl | one JSON object a line: training loss at intervals, evaluations |
| diagnostics.jsonl | the row optimizer's state at intervals: a line a report, by table |
| tensorboard/ | the same as curves: `tensorboard --logdir tensorboard` |
| checkpoints/ | newest and best; `resume=auto` goes on from the last, `recsys-basis inspect` lists them |
| test_predictions.parquet | label and logit of every evaluated row, in file order |
| result.json | final metrics, bytes, speed; written last, so its presence says the run finished |
"""


class RunFolder:
    """The folder of one run; only the main rank writes to it."""

    def __init__(self, config: TrainConfig, runtime: Runtime) -> None:
        """Open ``config.output_dir``, which ``refuse_used_folder`` has let pass."""
        self.path = Path(config.output_dir)
        self.checkpoints = self.path / "checkpoints"
        self._writes = runtime.is_main
        self._config, self._runtime = config, runtime

    def start(self, step: int) -> None:
        """Begin to write, at ``step``: what an earlier try logged after it is taken back.

        Raises ConfigError if the folder cannot be written.
        """
        if not self._writes:
            return
        try:
            self._open(step)
        except OSError as error:
            raise ConfigError(
                f"output_dir = {self.path} cannot be written ({error}): give it room and write "
                "permission, or choose another"
            ) from error

    def _open(self, step: int) -> None:
        drop_partial(self.checkpoints)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        (self.path / "result.json").unlink(missing_ok=True)
        (self.path / "README.md").write_text(README)
        OmegaConf.save(self._config.model_dump(mode="json"), self.path / "config.yaml")
        write_json(self.path / "environment.json", describe_environment(self._runtime))
        self._metrics = _open_log(self.path / "metrics.jsonl", step)
        self._diagnostics = _open_log(self.path / "diagnostics.jsonl", step)
        self._board = SummaryWriter(self.path / "tensorboard", purge_step=step + 1)

    def log(self, kind: str, step: int, **values: float | None) -> None:
        """Append numbers to metrics.jsonl and TensorBoard under ``kind/name``."""
        if not self._writes:
            return
        self._metrics.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def log_diagnostics(self, step: int, report: dict[str, Any]) -> None:
        """Append a report of ``Diagnostics`` to diagnostics.jsonl; TensorBoard gets medians over tables."""
        self._diagnostics.write(json.dumps({"step": step, **report}) + "\n")
        by_name: dict[str, list[float]] = {}
        for values in report["tables"].values():
            for name, value in numbers_of(values):
                by_name.setdefault(name, []).append(value)
        for name, numbers in by_name.items():
            self._board.add_scalar(f"diagnostics/{name}", median(numbers), step)

    def write_row_state(self, described: dict[str, dict[str, Any]]) -> None:
        """row_state.json: what ``describe_row_state`` found."""
        if self._writes:
            write_json(self.path / "row_state.json", described)

    def write_predictions(self, label: torch.Tensor, logit: torch.Tensor) -> None:
        """label [n] int8 and logit [n] float32 of all evaluated rows."""
        write_predictions(self.path, label.to(torch.int8).numpy(), logit.numpy())

    def finish(self, result: dict[str, Any]) -> None:
        """Write result.json, the mark of a finished run, and close the logs."""
        if self._writes:
            self._metrics.close()
            self._diagnostics.close()
            self._board.close()
            write_json(self.path / "result.json", result)


def numbers_of(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, value) of all numbers in nested objects; lists are left out."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from numbers_of(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def _open_log(path: Path, step: int) -> TextIO:
    """Open for appending, without the lines that an earlier try logged after ``step``."""
    lines = whole_lines(path) if path.exists() else []
    with written_whole(path) as kept:
        kept.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step))
    return path.open("a", buffering=1)


def refuse_used_folder(config: TrainConfig, runtime: Runtime) -> None:
    """Raise ConfigError on all ranks if ``config.output_dir`` holds a run that must not be touched.

    The main rank looks, before any rank writes: looking on its own, a late rank would find what the
    main rank has begun to write.
    """
    path = Path(config.output_dir)
    if config.resume == "auto":
        return
    is_used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if from_main(is_used and not _has_begun_from(path, config.resume_path)):
        raise ConfigError(
            f"output_dir = {path} is not empty: choose another, or resume=auto to continue that run"
        )


def _has_begun_from(path: Path, checkpoint: Path | None) -> bool:
    """Whether ``path`` holds this very run, begun from ``checkpoint``: as one that torchrun has restarted."""
    saved = path / "config.yaml"
    return checkpoint is not None and saved.is_file() and Path(OmegaConf.load(saved).resume) == checkpoint


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` so that ``path`` appears whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n")


def describe_environment(runtime: Runtime) -> dict[str, Any]:
    """Versions, machine, threads and git commit: what a number from this run depends on."""
    packages = ("recsys-basis", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "pyarrow")
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_commit": _git_commit(),
        "versions": {name: version for name in packages if (version := _version(name))},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "device": str(runtime.device),
        "world_size": runtime.world_size,
        "threads_per_rank": runtime.threads,
    }


def _cpu_model() -> str | None:
    """The processor's name where the system tells it (Linux); else None."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return name[1] if name else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the checkout this code runs from, with "+changes" where files differ; else None."""
    folder = Path(__file__).parent
    try:  # an installed package may lie inside the checkout of something else
        tracked = ["git", "ls-files", "--error-unmatch", __file__]
        subprocess.run(tracked, cwd=folder, capture_output=True, check=True)
        commit = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip()
