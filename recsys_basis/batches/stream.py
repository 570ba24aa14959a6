"""Which rows make which batch, on which rank, in which order.

The order of rows is a function of (seed, epoch) alone: row groups are permuted, taken
``window`` at a time, and the rows of a window are permuted together. Global batch k is rows
[k * size, (k + 1) * size) of that order on any number of ranks, and rank r of W takes its r-th
part of each. So 1, 2 and 4 ranks train on the same global batches, each row is seen once,
and a position in an epoch is one number: the batches done. The price: every rank decodes
every row group (about 0.8 CPU seconds a million rows here), though it keeps only its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recsys_basis.batches.batch import Batch
from recsys_basis.batches.parquet import Columns, RowGroup


@dataclass(frozen=True)
class Shuffle:
    """Order of one epoch; ``window`` row groups are held in memory and shuffled together."""

    seed: int
    epoch: int
    window: int


@dataclass(frozen=True)
class BatchStream:
    """Batches of one pass over ``groups`` for rank ``rank`` of ``world_size``.

    batch_size is the global one; shuffle None keeps the files' order; the last, partial batch
    is kept. Iterating from ``start_batch`` gives exactly what a full pass gives from there on.
    """

    groups: Sequence[RowGroup]
    batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: Shuffle | None = None
    start_batch: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of one pass on all ranks together."""
        return sum(group.num_rows for group in self.groups)

    @property
    def num_batches(self) -> int:
        """Global batches of a whole pass, also with ``start_batch``."""
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        skip = self.start_batch * self.batch_size
        pending: Columns | None = None
        for window, random in self._windows():
            rows_ahead = sum(group.num_rows for group in window)
            if skip >= rows_ahead:
                skip -= rows_ahead
                continue
            columns = Columns.join([group.read() for group in window])
            if random is not None:
                columns = columns.take(random.permutation(len(columns)))
            columns, skip = columns.take(slice(skip, None)), 0
            pending = columns if pending is None else Columns.join([pending, columns])
            whole = len(pending) // self.batch_size * self.batch_size
            for start in range(0, whole, self.batch_size):
                yield self._share(pending, start, start + self.batch_size)
            pending = pending.take(slice(whole, None))
        if pending is not None and len(pending):
            yield self._share(pending, 0, len(pending))

    def positions(self, rank: int) -> np.ndarray:
        """Positions in the pass of the rows that ``rank`` gets, in its order: int64."""
        parts = []
        for start in range(0, self.num_rows, self.batch_size):
            size = min(self.batch_size, self.num_rows - start)
            first, last = _part(size, rank, self.world_size)
            parts.append(np.arange(start + first, start + last))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _windows(self) -> Iterator[tuple[list[RowGroup], np.random.Generator | None]]:
        if self.shuffle is None:
            yield from (([group], None) for group in self.groups)
            return
        key = (self.shuffle.seed, self.shuffle.epoch)
        order = np.random.default_rng(key).permutation(len(self.groups))
        for number, start in enumerate(range(0, len(order), self.shuffle.window)):
            window = [self.groups[index] for index in order[start : start + self.shuffle.window]]
            yield window, np.random.default_rng((*key, number))

    def _share(self, columns: Columns, start: int, stop: int) -> Batch:
        first, last = _part(stop - start, self.rank, self.world_size)
        mine = columns.take(slice(start + first, start + last))
        return Batch.from_columns(mine.dense, mine.sparse, mine.label, global_rows=stop - start)


def _part(size: int, rank: int, world_size: int) -> tuple[int, int]:
    return size * rank // world_size, size * (rank + 1) // world_size
