"""The checkpoints of a run on disk: their records, checksums, and which of them are kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from recsys_basis.atomic import written_whole
from recsys_basis.errors import UserError
from recsys_basis.schema import Section, parse_section

RECORD_FILE = "progress.json"
PARTIAL = ".partial"
"""Suffix of a folder that is being written or removed: never a checkpoint."""

Metric = Literal["auc", "log_loss", "normalized_entropy"]
HIGHER_IS_BETTER = {"auc": True, "log_loss": False, "normalized_entropy": False}


class CheckpointError(UserError):
    """A checkpoint cannot be written, is damaged, hostile, or of another model."""


class Progress(Section):
    """How far a run is: ``step`` updates done in all, ``batch`` batches done of epoch ``epoch``."""

    step: int
    epoch: int
    batch: int
    evaluated_step: int
    """Step of the last evaluation; -1: there was none."""


class Record(Section):
    """What ``progress.json`` holds."""

    progress: Progress
    evaluation: dict[str, float] | None
    """Metrics of these weights, if they were evaluated before they were saved."""
    layout: dict[str, Any]
    """What must agree for the tensors to mean the same (``layout.py``)."""
    identity: dict[str, Any]
    """What must agree for the position in the data to mean the same."""
    sha256: dict[str, str]
    """Of every other file of the checkpoint, by name."""

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record of checkpoint ``path``. Raises CheckpointError naming the file."""
        file = path / RECORD_FILE
        try:
            values = json.loads(file.read_text())
            return parse_section(cls, values)
        except (OSError, ValueError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{file} cannot be read as a checkpoint's record: {reason}") from error

    def write(self, path: Path) -> None:
        """Write the record of checkpoint ``path``, through to the disk."""
        with written_whole(path / RECORD_FILE) as temporary, temporary.open("w") as file:
            json.dump(self.model_dump(), file, indent=2)
            file.flush()
            os.fsync(file.fileno())


def checkpoint_name(step: int) -> str:
    """Sorts as the steps do, up to 999,999,999."""
    return f"step-{step:09d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != PARTIAL)


def best_checkpoint(folder: Path, metric: Metric) -> tuple[Path, float] | None:
    """The evaluated checkpoint that is best by ``metric``, the earlier of equals, and its value."""
    values = [
        (path, evaluation[metric])
        for path in list_checkpoints(folder)
        if (evaluation := Record.read(path).evaluation) is not None
    ]
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    return max(values, key=lambda item: sign * item[1], default=None)


def is_better(value: float, than: float, metric: Metric) -> bool:
    """Whether ``value`` beats ``than``; equals do not."""
    return value > than if HIGHER_IS_BETTER[metric] else value < than


def drop_old(folder: Path, keep: int, best_by: Metric | None) -> None:
    """Remove all but the newest ``keep`` checkpoints and, with ``best_by``, the best."""
    checkpoints = list_checkpoints(folder)
    best = best_checkpoint(folder, best_by) if best_by is not None else None
    for path in checkpoints[:-keep]:
        if best is None or path != best[0]:
            remove(path)


def drop_partial(folder: Path) -> None:
    """Remove what a save that was broken off has left."""
    for path in folder.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path)


def remove(path: Path) -> None:
    """Remove checkpoint ``path``: half removed, it no longer goes by a checkpoint's name."""
    dying = path.with_name(path.name + PARTIAL)
    path.rename(dying)
    shutil.rmtree(dying)


def sync_folder(path: Path) -> None:
    """Have the names in ``path`` reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes, read in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_fault(path: Path, sha256: Iterable[tuple[str, str]]) -> str | None:
    """What is wrong with the first of the files (name, checksum) of checkpoint ``path``; None if nothing."""
    for name, checksum in sha256:
        if not (path / name).is_file():
            return f"{path / name} is missing: the checkpoint is not whole"
        try:
            found = sha256_of(path / name)
        except OSError as error:
            return f"{path / name} cannot be read: {error.strerror}"
        if found != checksum:
            return f"{path / name} is damaged (its checksum differs)"
    return None
