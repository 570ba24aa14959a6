"""Everything a run is, by torch.distributed.checkpoint: whole or not at all, and loading runs no code.

A checkpoint is a flat dict of tensors keyed by names, never by ranks:

    model/<parameter>                      tables as ShardedTensors in row order (``tables.py``)
    row_optimizer/<table>.<state>          as each row optimizer declares it
    dense_optimizer/<parameter>/<state>
    tower_average/<parameter>              where the run keeps one

and ``progress.json`` beside it: step, position in the data, the layout of the tables, checksums.
It is written to ``step-N.partial`` and renamed, so a crash while saving leaves the previous whole.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from recsys_basis.embeddings.state import local_tensors
from recsys_basis.errors import NonFiniteError, UserError
from recsys_basis.schema import Section, parse_section
from recsys_basis.training.build import Trainable

PROGRESS_FILE = "progress.json"
KEPT_CHECKPOINTS = 2


class CheckpointError(UserError):
    """A checkpoint is damaged, hostile, or of another model."""


class Progress(Section):
    """How far a run is: ``step`` updates done in all, ``batch`` batches done of epoch ``epoch``."""

    step: int
    epoch: int
    batch: int


def save_checkpoint(folder: Path, trainable: Trainable, progress: Progress, identity: dict[str, Any]) -> Path:
    """Save to ``folder/step-N`` (all ranks call it), then drop all but the newest two.

    identity: plain values that a run must share to continue from this position.
    With nothing saved, raises NonFiniteError naming the tensor if one holds NaN or infinity, and
    CheckpointError for state that is no tensor.
    """
    final = folder / f"step-{progress.step:09d}"
    if final in list_checkpoints(folder):  # a resumed run passes the step it came from
        return final
    state = _state(trainable)
    _refuse_unsound(state)
    partial = final.with_suffix(".partial")
    main = dist.get_rank() == 0
    if main:
        for broken_off in folder.glob("*.partial"):
            shutil.rmtree(broken_off)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(partial))
    if main:
        record = {
            "progress": progress.model_dump(),
            "layout": _layout(trainable) | identity,
            "sha256": {path.name: _sha256(path) for path in sorted(partial.iterdir())},
        }
        (partial / PROGRESS_FILE).write_text(json.dumps(record, indent=2) + "\n")
        partial.rename(final)
        for old in list_checkpoints(folder)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def _refuse_unsound(state: dict[str, Any]) -> None:
    """All ranks refuse together what a later load would choke on."""
    for key, value in state.items():  # the same keys and types on every rank
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{key} is a {type(value).__name__}, and only tensors can be loaded safely again: choose an "
                "optimizer that keeps its state in tensors"
            )
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _non_finite_key(state))
    keys = [key for key in found if key]
    if keys:
        raise NonFiniteError(f"{keys[0]} holds values that are not finite; nothing was saved")


def _non_finite_key(state: dict[str, Any]) -> str | None:
    for key, value in state.items():
        for tensor in local_tensors(value):
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return key
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")


def load_checkpoint(path: Path, trainable: Trainable, identity: dict[str, Any]) -> Progress:
    """Fill ``trainable`` in place from ``path`` (all ranks call it).

    Raises CheckpointError naming the file that is missing or damaged, or the key that does not fit.
    """
    record = _read_record(path)
    _refuse_other_layout(path, record["layout"], _layout(trainable) | identity)
    for name, checksum in record["sha256"].items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing: the checkpoint is not whole; use an older one")
        if _sha256(path / name) != checksum:
            raise CheckpointError(f"{path / name} is damaged (its checksum differs); use an older checkpoint")
    reader = SafeReader(path)
    progress = parse_section(Progress, record["progress"], where="progress")
    trainable.grow(progress.step)
    state = _state(trainable)
    dense_keys = _dense_state_from_metadata(reader.read_metadata())
    state = {
        key: value for key, value in state.items() if not key.startswith("dense_optimizer/")
    } | dense_keys
    try:
        dcp.load(state, storage_reader=reader)
    except CheckpointException as error:
        reasons = "; ".join(str(wrapped[0]) for wrapped in error.failures.values())
        raise CheckpointError(f"{path}: its tensors cannot be loaded: {reasons}") from error
    _load_dense_optimizer(trainable, dense_keys)
    return progress


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, except that its pickled index may name only the classes an index is made of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as a checkpoint index: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} does not hold a checkpoint index")
        if not all(
            isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()
        ):
            raise CheckpointError(f"{path} lists entries that are not tensors")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    _ALLOWED: ClassVar = {
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "_MEM_FORMAT_ENCODING",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
            )
        ),
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint index needs")


def _state(trainable: Trainable) -> dict[str, Any]:
    state: dict[str, Any] = {f"model/{key}": value for key, value in trainable.model.state_dict().items()}
    for entries in trainable.row_optimizer.state_dict()["state"].values():
        state |= {f"row_optimizer/{key}": value for key, value in entries.items()}
    names = _dense_names(trainable)
    for index, entries in trainable.dense_optimizer.state_dict()["state"].items():
        state |= {f"dense_optimizer/{names[index]}/{key}": value for key, value in entries.items()}
    if trainable.tower_average is not None:
        state |= {f"tower_average/{name}": value for name, value in trainable.tower_average.state.items()}
    return state


def _dense_names(trainable: Trainable) -> dict[int, str]:
    """Parameter name of each index in the dense optimizer's state_dict, which counts group by group."""
    return {
        index: name
        for group in trainable.dense_optimizer.state_dict()["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
    }


def _dense_state_from_metadata(metadata: Metadata) -> dict[str, torch.Tensor]:
    """Empty tensors to load into: a fresh optimizer has no state yet to be filled in place."""
    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith("dense_optimizer/") and isinstance(entry, TensorStorageMetadata)
    }


def _load_dense_optimizer(trainable: Trainable, loaded: dict[str, torch.Tensor]) -> None:
    indices = {name: index for index, name in _dense_names(trainable).items()}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in loaded.items():
        parameter, name = key.removeprefix("dense_optimizer/").rsplit("/", 1)
        state.setdefault(indices[parameter], {})[name] = value
    groups = trainable.dense_optimizer.state_dict()["param_groups"]
    trainable.dense_optimizer.load_state_dict({"state": state, "param_groups": groups})


def _layout(trainable: Trainable) -> dict[str, Any]:
    """What must agree for the tensors to mean the same; rates and clips may change between the two."""
    config = trainable.config.model_dump(mode="json")
    free = {"learning_rate", "weight_decay", "clip"}
    dense = {key: value for key, value in config["dense_optimizer"].items() if key not in free}
    rows = {
        name: each.model_dump(mode="json", exclude=free)
        for name, each in trainable.row_optimizer_of_table.items()
    }
    # Named once where most tables share it, so that a refusal does not repeat itself for each table.
    usual = max(rows.values(), key=list(rows.values()).count)
    tables = {
        table.name: {
            "num_ids": table.num_ids,
            "embedding_dim": table.embedding_dim,
            "num_partitions": table.num_partitions,
        }
        for table in trainable.tables
    }
    for name, blocks in trainable.column_blocks().items():
        tables[name]["column_blocks"] = blocks
    return {
        "tables": tables,
        "model": config["model"],
        "pooling": config["embedding"]["pooling"],
        # C++ and plain PyTorch keep the same state: a run may go on with the other.
        "kernel": "fbgemm" if config["embedding"]["kernel"] == "fbgemm" else "recsys_basis",
        "row_optimizer": usual,
        "table_row_optimizers": {name: each for name, each in rows.items() if each != usual},
        "dense_optimizer": dense,
        "tower_average_decay": config["tower_average_decay"],
    }


def _refuse_other_layout(path: Path, saved: Any, current: Any) -> None:
    differing = list(_differences(saved, current))
    if differing:
        lines = [f"  {key} = {was!r}, this run has {now!r}" for key, was, now in differing]
        raise CheckpointError(
            "\n".join([f"{path} is of another model; it was saved with", *lines])
            + "\nmake the config agree, or start anew with resume=never and another output_dir"
        )


def _differences(saved: Any, current: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(saved, dict) and isinstance(current, dict):
        for name in {**saved, **current}:
            inner = f"{key}.{name}" if key else name
            yield from _differences(saved.get(name), current.get(name), inner)
    elif saved != current:
        yield key, saved, current


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / PROGRESS_FILE).read_text())
        if {"progress", "layout", "sha256"} <= record.keys():
            return dict(record)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / PROGRESS_FILE} cannot be read: {error}") from error
    raise CheckpointError(f"{path / PROGRESS_FILE} is not a record of this program")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
