"""At every n-th step and at the last: watch it, read the state after it, put all ranks together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from recsys_basis.diagnostics.buckets import ShardBuckets
from recsys_basis.diagnostics.merging import merge_readings
from recsys_basis.diagnostics.reading import ShardReading, read_shards
from recsys_basis.diagnostics.watch import Watch
from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.row_optimizers.basis import Basis


class Diagnostics:
    """Of this rank's ``bags``. Every rank makes one, and calls it at the same steps."""

    def __init__(self, bags: Sequence[RowOptimizedEmbeddingBags], every_steps: int | None) -> None:
        self.bags, self.every_steps = bags, every_steps
        self._watches: list[Watch] | None = None
        self._shards: dict[int, tuple[int, list[ShardBuckets]]] = {}

    def watch(self, step: int, num_steps: int) -> None:
        """Before backward of the step that makes ``step`` whole."""
        if self.every_steps is not None and (step % self.every_steps == 0 or step == num_steps):
            self._watches = [Watch(bags) for bags in self.bags]

    def report(self) -> dict[str, Any] | None:
        """After the update of a watched step, else None. Collective: the main rank gets all, others None.

        {"seconds": what the report took on the main rank, "tables": {name: ...}}, see merging.py.
        """
        if self._watches is None:
            return None
        start = time.perf_counter()
        watches, self._watches = self._watches, None
        readings: list[ShardReading] = []
        for watch in watches:
            watch.end()
            readings += read_shards(watch, self._buckets(watch.bags))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(readings, gathered if dist.get_rank() == 0 else None)
        if dist.get_rank() != 0:
            return None
        tables = merge_readings([reading for of_rank in gathered for reading in of_rank])
        return {"seconds": time.perf_counter() - start, "tables": tables}

    def _buckets(self, bags: RowOptimizedEmbeddingBags) -> list[ShardBuckets]:
        """Found once, and again where the rule has changed their number."""
        optimizer = bags.row_optimizer
        if not isinstance(optimizer, Basis):
            return []
        known = self._shards.get(id(bags))
        if known is None or known[0] != optimizer.buckets.num_buckets:
            shards = [ShardBuckets.of(optimizer, index) for index in range(len(optimizer.shards))]
            known = self._shards[id(bags)] = (optimizer.buckets.num_buckets, shards)
        return known[1]
