"""A checkpoint into a run, at any number of ranks. Nothing changes before all of it is known to fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from recsys_basis.checkpoints.folder import CheckpointError, Progress, Record, find_fault
from recsys_basis.checkpoints.growth import load_grown
from recsys_basis.checkpoints.index import SafeReader
from recsys_basis.checkpoints.layout import differences, grown_tables, layout_of
from recsys_basis.checkpoints.state import set_tensors, tensors_in_place, tensors_to_set
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.ingest.vocabulary import vocabulary_digest
from recsys_basis.row_optimizers.base import TableState
from recsys_basis.row_optimizers.basis import BasisConfig
from recsys_basis.tables import Table
from recsys_basis.training.build import Trainable
from recsys_basis.training.spec import TrainConfig

START = Progress(step=0, epoch=0, batch=0, evaluated_step=-1)


@dataclass(frozen=True)
class Loaded:
    """Where to go on, and what the user should hear of it."""

    progress: Progress
    told: tuple[str, ...] = ()


def load_checkpoint(
    path: Path, trainable: Trainable, identity: dict[str, Any], new_data: bool = False
) -> Loaded:
    """Fill ``trainable`` in place from ``path`` (all ranks call it).

    new_data: where identity["data"] differs, take the model alone: training begins at step 0, and tables
    may have more rows than the saved ones, whose ids must mean what they meant (identity["vocabulary"]).
    Raises CheckpointError naming the file that is missing or damaged, or the key that does not fit.
    """
    record = Record.read(path)
    begins_anew = new_data and record.identity["data"] != identity["data"]
    grown = grown_tables(record.layout, trainable.tables) if begins_anew else {}
    if grown and trainable.config.embedding.kernel == "fbgemm":
        raise CheckpointError(
            f"{path}: tables {', '.join(grown)} have more rows now, and the state that FBGEMM keeps of their "
            "old rows cannot be placed; train with embedding.kernel=auto, or start anew with resume=never"
        )
    _refuse_other_model(path, record, trainable, identity, begins_anew, grown)
    _refuse_damaged(path, record)
    _grow(path, trainable, record.progress.step, begins_anew)
    try:
        _fill(SafeReader(path), trainable, grown)
    except CheckpointException as error:
        reasons = "; ".join(str(wrapped[0]) for wrapped in error.failures.values())
        raise CheckpointError(f"{path}: its tensors cannot be loaded: {reasons}") from error
    if not begins_anew:
        return Loaded(record.progress)
    new = {table.name: table for table in trainable.tables}
    told = [f"{path} was trained on other data: its model is taken, training begins at step 0"]
    for name, old in grown.items():
        told.append(
            f"table {name} has {new[name].num_ids - old.num_ids:,} new ids from id {old.num_ids:,} on; "
            "they start as in a fresh table, and so do its bucket rows, if the row optimizer has any"
        )
    return Loaded(START, tuple(told))


def _grow(path: Path, trainable: Trainable, step: int, begins_anew: bool) -> None:
    """To the size of step ``step``, which a run from step 0 would take back: all ranks refuse that."""
    grew = [False] * dist.get_world_size()
    dist.all_gather_object(grew, trainable.grow(step))
    if begins_anew and any(grew):
        raise CheckpointError(
            f"{path}: row optimizer state has grown in its {step} steps (row_optimizer.grow_at), and a run "
            "that begins on other data would take that back; take a checkpoint from before the growth, or "
            "start anew with resume=never"
        )


def _fill(reader: SafeReader, trainable: Trainable, grown: dict[str, Table]) -> None:
    state, apart = tensors_in_place(trainable), {}
    parts = [part for bags in trainable.embedding_bags() for part in bags.row_optimizer.table_states()]
    per_row = {_key_of(part) for part in parts if part.per == "row"}
    # A number of the table belongs to its rows' state; where there is none, to that of buckets.
    with_rows = {part.table for part in parts if part.per == "row"}
    of_buckets = {_key_of(part) for part in parts if part.per == "table" and part.table not in with_rows}
    for key, value in list(state.items()):
        table = _table_of(key)
        if table in grown and (isinstance(value, ShardedTensor) or key in of_buckets):
            del state[key]
            if key.startswith("model/") or key in per_row:
                apart[key] = value
    loaded = tensors_to_set(trainable, reader.tensors())
    dcp.load(state | loaded, storage_reader=reader)
    for new in trainable.tables:
        if new.name in grown:
            tensors = {key: value for key, value in apart.items() if _table_of(key) == new.name}
            load_grown(reader, tensors, grown[new.name], new)
    set_tensors(trainable, loaded)


def _key_of(part: TableState) -> str:
    return f"row_optimizer/{part.table}.{part.name}"


def _table_of(key: str) -> str:
    """Of model/….<table>.weight and row_optimizer/<table>.<state>."""
    return key.split("/", 1)[1].split(".")[-2] if "." in key else ""


def _refuse_other_model(
    path: Path,
    record: Record,
    trainable: Trainable,
    identity: dict[str, Any],
    begins_anew: bool,
    grown: dict[str, Table],
) -> None:
    layout, wanted = layout_of(trainable), dict(identity)
    saved = dict(record.identity)
    for name in grown:
        layout["tables"][name] = record.layout["tables"][name]
    if begins_anew:  # then the position in the data means nothing, but ids must
        saved, wanted = ({"vocabulary": dict(each["vocabulary"])} for each in (saved, wanted))
        folder = trainable.config.dataset.prepared_dir
        for name in grown.keys() & saved["vocabulary"].keys():
            digest = vocabulary_digest(Manifest.load(folder), folder, name, grown[name].num_ids)
            wanted["vocabulary"][name] = digest
    found = list(differences(record.layout | saved, layout | wanted))
    if found:
        lines = [f"  {key} = {was!r}, this run has {now!r}" for key, was, now in found]
        solved = any(key.endswith(("rows_per_bucket", "head_bucket_share")) for key, _, _ in found)
        if solved and _has_budget(trainable.config):
            lines.append(
                "state_budget is solved for the sizes of the tables, which are others now: in its place give "
                "these keys' saved values (row_optimizer.state_budget=null, tables in table_row_optimizers)"
            )
        raise CheckpointError(
            "\n".join([f"{path} is of another model; it was saved with", *lines])
            + "\nmake the config agree, or start anew with resume=never and another output_dir"
        )


def _has_budget(config: TrainConfig) -> bool:
    sections = (config.row_optimizer, *(config.table_row_optimizers or {}).values())
    return any(isinstance(each, BasisConfig) and each.state_budget is not None for each in sections)


def _refuse_damaged(path: Path, record: Record) -> None:
    """Each rank reads its share of the files; all refuse together."""
    share = sorted(record.sha256.items())[dist.get_rank() :: dist.get_world_size()]
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, find_fault(path, share))
    if found := [fault for fault in faults if fault]:
        raise CheckpointError(f"{found[0]}; remove {path} to go on from an older checkpoint")
