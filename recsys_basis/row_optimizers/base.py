"""The signature every row optimizer stands behind.

A row optimizer owns the optimizer state of a group of table shards on one rank and applies
one update from inside backward: it gets the U distinct rows that a batch touched, their weights
in float32 and one summed gradient for each, already clipped, and changes those weights in place.
However few bits the tables have, a rule computes in float32 (``storage.py``).

Rows of a group are numbered 0..R-1: the shards' rows one after the other. State is stored
the same way, so each table's part of it is a view, and that view is what checkpoints save.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from recsys_basis.row_optimizers.clipping import RowClip
from recsys_basis.schema import Section
from recsys_basis.tables import Table, TableShard


class RowOptimizerConfig(Section):
    """Keys that every row optimizer has."""

    rule: str
    """Name in ``ROW_OPTIMIZERS``, or ``package.module:Class`` of your own rule."""
    learning_rate: Annotated[float, Field(ge=0.0)]
    """eta, before the schedule's factor."""
    weight_decay: Annotated[float, Field(ge=0.0)]
    """lambda, decoupled: touched rows also lose eta * lambda * w."""
    clip: RowClip
    """What shortens a row's gradient before the update."""

    @property
    def needs_counts(self) -> bool:
        """Whether the rule reads how often ids came in the training part (``Table.counts``)."""
        return False


@dataclass(frozen=True)
class State:
    """One tensor of optimizer state of a group, and what its first dimension counts.

    per="row":    [R] or [R, D], one entry for each row of the group
    per="bucket": [K] or [K, D], the shards' bucket rows one after the other (local ones only)
    per="table":  [T], one number a table, the same on every rank
    """

    tensor: torch.Tensor
    per: Literal["row", "bucket", "table"]


@dataclass(frozen=True)
class TableState:
    """One table's part of one state: a view of live memory, and its place in the whole table.

    The whole table's state has ``global_rows`` rows, of which ``tensor`` is
    [offset, offset + len(tensor)). For per="table" the tensor is [1] and replicated.
    """

    shard: int
    """Which of the optimizer's shards: under column-wise sharding several can be of one table."""
    table: str
    name: str
    per: Literal["row", "bucket", "table"]
    tensor: torch.Tensor
    offset: int
    global_rows: int


class RowOptimizer(ABC):
    """Base of all rules. A subclass fills ``self.state`` in ``__init__`` and writes ``update``."""

    config_type: ClassVar[type[RowOptimizerConfig]] = RowOptimizerConfig

    def __init__(
        self, config: RowOptimizerConfig, shards: Sequence[TableShard], device: torch.device | str = "cpu"
    ) -> None:
        """``shards``: the group's table shards on this rank, all of one D, in storage order."""
        self.config = config
        self.shards = tuple(shards)
        self.device = torch.device(device)
        self.embedding_dim = self.shards[0].table.embedding_dim
        self.state: dict[str, State] = {}
        starts = [0]
        for shard in self.shards:
            starts.append(starts[-1] + shard.num_rows)
        self.row_starts = tuple(starts[:-1])
        """First group row of each shard."""
        self.num_rows = starts[-1]
        """R."""

    @classmethod
    def state_bytes_of(cls, config: RowOptimizerConfig, shard: TableShard) -> int:
        """Most bytes of state that ``shard`` will have in a run: what a planner asks before memory is taken.

        It is the rule itself, built where tensors have shapes and no memory. A rule whose ``__init__`` must
        read what it made overrides this by a formula.
        """
        optimizer = cls(config, [shard], "meta")
        optimizer.grow(sys.maxsize)
        return optimizer.state_bytes()

    @classmethod
    def state_follows_columns(cls, config: RowOptimizerConfig, table: Table) -> bool:
        """Whether each column of ``table`` has state of its own; if not, blocks of columns repeat some."""
        states = cls(config, [TableShard.whole(table)], "meta").state.values()
        return all(state.per == "table" or state.tensor.dim() == 2 for state in states)

    @abstractmethod
    def update(
        self, weights: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, learning_rate: float
    ) -> None:
        """Apply one step in place.

        weights [U, D] float32, of the touched rows; rows [U] int64, distinct, ascending group rows;
        gradients [U, D] float32, duplicates already summed; learning_rate: eta after the schedule.
        """

    def grow(self, step: int) -> bool:
        """Give state the size that it has after ``step`` steps of a run; whether that is another one.

        Rules whose state grows during training override it, and may put new tensors into ``self.state``.
        """
        return False

    def buckets_of_shard(self, shard: TableShard, name: str) -> tuple[int, int, int]:
        """(local bucket rows, first global bucket row, global bucket rows) of state ``name`` of ``shard``.

        Rules with buckets override it. A state may have fewer bucket rows than K: momentum of head rows only.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no bucket state")

    def table_states(self) -> Iterator[TableState]:
        """Every state of every table, as views to save, load, and count bytes from.

        A state of which a table has no row at all (head rows where it has no head) is left out.
        """
        for name, state in self.state.items():
            start = 0
            for index, shard in enumerate(self.shards):
                if state.per == "row":
                    start, size = self.row_starts[index], shard.num_rows
                    offset, global_rows = shard.row_offset, shard.table.num_rows
                elif state.per == "bucket":
                    size, offset, global_rows = self.buckets_of_shard(shard, name)
                else:
                    start, size, offset, global_rows = index, 1, 0, 1
                if global_rows > 0:
                    view = state.tensor[start : start + size]
                    yield TableState(index, shard.table.name, name, state.per, view, offset, global_rows)
                start += size

    def state_bytes(self) -> int:
        """Bytes of live optimizer state on this rank."""
        return sum(state.tensor.nbytes for state in self.state.values())
