"""Saving beside training: a snapshot now, the writing in a thread, the verdict at the next save.

Ranks act together, in the writing too: what fails on one rank fails the save on all, nothing of it stays,
and earlier checkpoints are as they were.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from recsys_basis.checkpoints import folder
from recsys_basis.checkpoints.folder import CheckpointError, Progress, Record
from recsys_basis.checkpoints.layout import layout_of
from recsys_basis.checkpoints.state import state_of
from recsys_basis.embeddings.state import local_tensors
from recsys_basis.errors import NonFiniteError, UserError
from recsys_basis.training.build import Trainable
from recsys_basis.training.runtime import from_main, new_cpu_group

T = TypeVar("T")


class CheckpointSaver:
    """Writes the checkpoints of one run to a folder; all ranks call its methods in the same order.

    identity: plain values that a run must share to continue from a checkpoint's position.
    """

    def __init__(self, path: Path, trainable: Trainable, identity: dict[str, Any]) -> None:
        self.path, self.config = path, trainable.config
        self._trainable, self._identity = trainable, identity
        # Collectives of the writing thread would mix with training's in one group.
        self._group = new_cpu_group(self.config.runtime)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._saved_step: int | None = None

    def save(
        self, progress: Progress, evaluation: dict[str, float] | None = None, wait: bool = False
    ) -> Path:
        """Save to ``path``/step-N, then drop all but the newest ``checkpoint_keep`` and the best.

        With ``checkpoint_asynchronous``, unless ``wait``, only a copy of all tensors is made now. A save
        still being written is waited for first, and its failure raised. With nothing saved, raises
        NonFiniteError naming a tensor that holds NaN or infinity, and CheckpointError for state that is no
        tensor, or with the reason why a file cannot be written.
        """
        self.wait()
        final = self.path / folder.checkpoint_name(progress.step)
        if progress.step == self._saved_step:  # as a resumed run passes the step it came from
            self._together(lambda: self._amend(final, progress, evaluation), final)
            return final
        state = state_of(self._trainable)
        self._refuse_unsound(state)
        record = Record(
            progress=progress,
            evaluation=evaluation,
            layout=layout_of(self._trainable),
            identity=self._identity,
            sha256={},
        )
        self._saved_step = progress.step
        if self.config.checkpoint_asynchronous and not wait:
            snapshot = BlockingAsyncStager().stage(state)
            self._writing = self._thread.submit(self._write, snapshot, final, record)
        else:
            self._write(state, final, record)
        return final

    def mark_saved(self, step: int) -> None:
        """Say that the checkpoint of ``step`` is in the folder: this run came from it."""
        self._saved_step = step

    def wait(self) -> None:
        """Wait until nothing is being written. Raises what made the writing fail."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def has_failed(self) -> bool:
        """Whether the save in the background has failed on this rank: ``wait`` raises the reason."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def is_best(self, evaluation: dict[str, float] | None) -> bool:
        """Whether the main rank's ``evaluation`` beats every checkpoint's: no without checkpoint_best_by."""
        metric = self.config.checkpoint_best_by
        if metric is None:
            return False
        self.wait()
        best = folder.best_checkpoint(self.path, metric)
        return from_main(
            evaluation is not None and (best is None or folder.is_better(evaluation[metric], best[1], metric))
        )

    def close(self) -> None:
        """Let the writing end before the process group does; log a failure that nothing has raised."""
        self._thread.shutdown(wait=True)
        if self.has_failed():
            assert self._writing is not None
            logging.getLogger(__name__).error("%s", self._writing.exception())

    def _write(self, state: dict[str, Any], final: Path, record: Record) -> None:
        partial = final.with_name(final.name + folder.PARTIAL)
        main, prefix = dist.get_rank() == 0, f"__{dist.get_rank()}_"

        def begin() -> None:
            if main:
                folder.drop_partial(self.path)
                partial.mkdir(parents=True)

        def checksums() -> dict[str, str]:
            mine = [path for path in partial.iterdir() if path.name.startswith(prefix)]
            mine += [partial / ".metadata"] if main else []
            return {path.name: folder.sha256_of(path) for path in mine}

        def commit() -> None:
            if main:
                record.model_copy(update={"sha256": sums}).write(partial)
                folder.sync_folder(partial)
                partial.rename(final)
                folder.sync_folder(self.path)
                folder.drop_old(self.path, self.config.checkpoint_keep, self.config.checkpoint_best_by)

        try:
            self._together(begin, final)
            try:
                writer = dcp.FileSystemWriter(partial)
                dcp.save(state, storage_writer=writer, process_group=self._group)
            except CheckpointException as error:
                raise self._failure(
                    final, [str(wrapped[0]) for wrapped in error.failures.values()]
                ) from error
            shares = self._together(checksums, final)
            sums = {name: digest for share in shares for name, digest in sorted(share.items())}
            self._together(commit, final)
        except CheckpointError:
            if main:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _amend(self, final: Path, progress: Progress, evaluation: dict[str, float] | None) -> None:
        """Add an evaluation to a checkpoint that was saved without."""
        if evaluation is not None and dist.get_rank() == 0:
            update = {"evaluation": evaluation, "progress": progress}
            Record.read(final).model_copy(update=update).write(final)
            folder.drop_old(self.path, self.config.checkpoint_keep, self.config.checkpoint_best_by)

    def _together(self, work: Callable[[], T], final: Path) -> list[T]:
        """What ``work()`` gives on each rank; all raise CheckpointError if it fails on one."""
        mine: tuple[T | None, str | None]
        try:
            mine = (work(), None)
        except (OSError, UserError) as error:
            mine = (None, str(error))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        if reasons := [reason for _, reason in everyone if reason]:
            raise self._failure(final, reasons)
        return [value for value, _ in everyone]

    def _failure(self, final: Path, reasons: list[str]) -> CheckpointError:
        kept = folder.list_checkpoints(self.path)
        return CheckpointError(
            f"{final} could not be saved: {'; '.join(sorted(set(reasons)))}. "
            + (f"The newest whole checkpoint is {kept[-1]}" if kept else "No checkpoint was saved before")
            + "; give the folder room and write permission, then go on with resume=auto"
        )

    def _refuse_unsound(self, state: dict[str, Any]) -> None:
        """All ranks refuse together what a later load would choke on."""
        for key, value in state.items():  # the same keys and types on every rank
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{key} is a {type(value).__name__}, and only tensors can be loaded safely again: choose "
                    "an optimizer that keeps its state in tensors"
                )
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, _non_finite_key(state), group=self._group)
        keys = [key for key in found if key]
        if keys:
            raise NonFiniteError(f"{keys[0]} holds values that are not finite; nothing was saved")


def _non_finite_key(state: dict[str, Any]) -> str | None:
    for key, value in state.items():
        for tensor in local_tensors(value):
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return key
    return None
