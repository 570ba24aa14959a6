"""Rows of a smaller saved table to their places in a larger one.

Rows are striped over partitions (``tables.py``), so a table of more ids has another layout: each saved
row is found by its id, read from its old place and written to its new one. New rows stay as they are in
a fresh table, weights and state. So do all bucket rows of the table: which rows share one depends on the
number of rows, and a mean over other rows would be nobody's second moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from recsys_basis.checkpoints.index import SafeReader
from recsys_basis.tables import Table


@dataclass(frozen=True)
class Window:
    """The part of a saved tensor that one shard takes rows from.

    offset  where ``saved`` [n, ...] begins in the whole saved tensor
    rows    [k] int64, rows of ``live`` that were saved; source [k] int64, the row of ``saved`` of each
    """

    key: str
    offset: torch.Size
    saved: torch.Tensor
    live: torch.Tensor
    rows: torch.Tensor
    source: torch.Tensor

    @classmethod
    def of(cls, key: str, shard: Shard, old: Table, new: Table) -> Window:
        """``shard`` of a tensor with one entry for each row of ``new``; ``old`` is the saved table."""
        first, *columns = shard.metadata.shard_offsets
        ids = new.ids_of(torch.arange(first, first + len(shard.tensor)))
        rows = (ids < old.num_ids).nonzero().view(-1)
        source = old.rows_of(ids[rows])
        start, stop = (int(source.min()), int(source.max()) + 1) if len(source) else (0, 0)
        saved = torch.empty(stop - start, *shard.tensor.shape[1:], dtype=shard.tensor.dtype)
        return cls(key, torch.Size([start, *columns]), saved, shard.tensor, rows, source - start)

    def fill(self) -> None:
        """Write the loaded rows to their new places."""
        device = self.live.device
        self.live[self.rows.to(device)] = self.saved[self.source].to(device)


def load_grown(reader: SafeReader, tensors: dict[str, ShardedTensor], old: Table, new: Table) -> None:
    """Fill ``tensors``, each with one entry for each row of ``new``, from a checkpoint of ``old``.

    All ranks call it, each with the tensors of which it holds a shard.
    """
    windows = [
        Window.of(key, shard, old, new) for key, tensor in tensors.items() for shard in tensor.local_shards()
    ]
    dcp.load({}, storage_reader=reader, planner=_WindowPlanner(windows, reader.tensors()))
    for window in windows:
        window.fill()


class _WindowPlanner(DefaultLoadPlanner):
    """Reads windows of saved tensors; those of different ranks may overlap."""

    def __init__(self, windows: Sequence[Window], entries: Mapping[str, TensorStorageMetadata]) -> None:
        super().__init__()
        self.windows = {(window.key, window.offset): window for window in windows}
        self.entries = entries

    def create_local_plan(self) -> LoadPlan:
        requests: list[Any] = []
        for (key, offset), window in self.windows.items():
            chunk = ChunkStorageMetadata(offset, window.saved.size())
            requests += create_read_items_for_chunk_list(key, self.entries[key], [chunk])
        return LoadPlan(requests)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.windows[index.fqn, index.offset].saved
