"""A tiny model trained for a few steps in this process, and a checkpoint of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.tiny import tiny_config

from recsys_basis.batches.parquet import list_row_groups
from recsys_basis.batches.stream import BatchStream
from recsys_basis.checkpoints.folder import Progress
from recsys_basis.checkpoints.save import CheckpointSaver
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.training.build import Trainable, build
from recsys_basis.training.runtime import Runtime, start_runtime

IDENTITY = {"seed": 0, "data": "these rows", "vocabulary": {"C1": "these values"}}


def at(step: int) -> Progress:
    return Progress(step=step, epoch=0, batch=step, evaluated_step=-1)


def save_checkpoint(folder: Path, trainable: Trainable, step: int = 3) -> Path:
    """One checkpoint, written before this returns."""
    return CheckpointSaver(folder, trainable, IDENTITY).save(at(step), wait=True)


@contextmanager
def trained(prepared: Path, *overrides: str, **options: Any) -> Iterator[Trainable]:
    """``train_a_little`` in a process group of this process alone, or of the ranks of the environment."""
    with start_runtime(tiny_config(prepared, Path("unused"), *overrides).runtime) as runtime:
        yield train_a_little(runtime, prepared, *overrides, **options)


def train_a_little(
    runtime: Runtime,
    prepared: Path,
    *overrides: str,
    steps: int = 3,
    more_ids: Mapping[str, int] | None = None,
) -> Trainable:
    """more_ids: of each table named, how many its vocabulary has beyond the data's."""
    manifest, more = Manifest.load(prepared), more_ids or {}
    cardinalities = {name: ids + more.get(name, 0) for name, ids in manifest.cardinalities.items()}
    config = tiny_config(prepared, Path("unused"), *overrides)
    trainable = build(config, manifest.model_copy(update={"cardinalities": cardinalities}), runtime)
    stream = iter(BatchStream(list_row_groups(sorted((prepared / "train").iterdir())), 64))
    for step in range(steps):
        batch = next(stream)
        trainable.start_step(step, 10)
        logits = trainable.model(batch.dense, batch.sparse).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
        trainable.finish_step()
    return trainable
