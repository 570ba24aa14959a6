"""Numbers of one table shard on one rank, after a step: what merging over ranks needs, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recsys_basis.diagnostics.buckets import NUM_WORST, ShardBuckets
from recsys_basis.diagnostics.watch import Watch
from recsys_basis.row_optimizers.basis import Basis
from recsys_basis.row_optimizers.bias import bias_correction
from recsys_basis.row_optimizers.storage import DTYPES, LOG8_VALUES, as_float32

SAMPLED_ENTRIES = 1000
"""Rows of a state's tensor that are looked at, evenly spaced."""


@dataclass(frozen=True)
class StateRange:
    """Entries of one state in the sampled rows that are not all zero."""

    entries: int
    underflowed: int
    """Zero, or below the dtype's smallest normal number."""
    smallest: float
    """Of the entries' magnitudes that are not zero; infinite where there are none."""
    largest: float


@dataclass(frozen=True)
class BucketReading:
    """Of a rule with buckets; see ``ShardBuckets``."""

    colliding_rows: int
    """Of the rows that the step touched, those with another touched row in their bucket."""
    loads: NDArray[np.int64]
    hottest: list[tuple[int, int]]
    fullest: list[tuple[int, list[int]]]
    scalars: NDArray[np.float32]
    """s of those sampled rows that were touched; empty for a rule without s."""
    bounds: tuple[float, float] | None
    """What s is clipped to, if it is."""
    widest: list[tuple[int, float, list[int]]]
    """(bucket, largest over smallest s of its rows, its ids by descending s), of the sampled buckets."""


@dataclass(frozen=True)
class ShardReading:
    """Of one shard of ``table``."""

    table: str
    first_row: int
    """Of the table. Shards with the same one hold the same rows: blocks of columns, and replicas."""
    rows_touched: int
    weight_square: float
    """Sum of squares of the touched rows' weights before the step; ``update_square``: of their change."""
    update_square: float
    states: dict[str, StateRange]
    buckets: BucketReading | None


def read_shards(watch: Watch, buckets: list[ShardBuckets]) -> Iterator[ShardReading]:
    """A reading of each shard of the watched bags; ``buckets`` is empty for a rule without them."""
    optimizer = watch.bags.row_optimizer
    change = watch.bags.stored.read(watch.rows) - watch.before
    weights, updates = _sums_of_squares(watch.before), _sums_of_squares(change)
    starts = torch.tensor([*optimizer.row_starts, optimizer.num_rows], device=watch.rows.device)
    bounds = torch.searchsorted(watch.rows, starts).tolist()
    colliding = _colliding(optimizer, watch.rows) if isinstance(optimizer, Basis) else None
    states: list[dict[str, StateRange]] = [{} for _ in optimizer.shards]
    for state in optimizer.table_states():
        is_count = not state.tensor.is_floating_point() and state.tensor.dtype != DTYPES["log8"]
        if state.per != "table" and not is_count and len(state.tensor):
            states[state.shard][state.name] = range_of(state.tensor)
    for index, shard in enumerate(optimizer.shards):
        touched = slice(bounds[index], bounds[index + 1])
        of_buckets = None
        if isinstance(optimizer, Basis) and colliding is not None:
            of_buckets = _read_buckets(optimizer, buckets[index], int(colliding[touched].sum()))
        yield ShardReading(
            table=shard.table.name,
            first_row=shard.row_offset,
            rows_touched=touched.stop - touched.start,
            weight_square=float(weights[touched].sum()),
            update_square=float(updates[touched].sum()),
            states=states[index],
            buckets=of_buckets,
        )


def range_of(tensor: torch.Tensor) -> StateRange:
    """Of a state [n] or [n, D], of any dtype that holds float32 numbers."""
    sample = as_float32(tensor[:: -(-len(tensor) // SAMPLED_ENTRIES)]).abs()
    tiny = torch.finfo(tensor.dtype).tiny if tensor.is_floating_point() else float(LOG8_VALUES[1])
    seen = sample[sample.reshape(len(sample), -1).any(dim=1)]
    positive = seen[seen > 0]
    return StateRange(
        entries=seen.numel(),
        underflowed=int((seen < tiny).sum()),
        smallest=float(positive.min()) if len(positive) else float("inf"),
        largest=float(positive.max()) if len(positive) else 0.0,
    )


def scalars_of(optimizer: Basis, buckets: ShardBuckets) -> tuple[torch.Tensor, torch.Tensor]:
    """s [n] float32 of the sampled rows, as the last step left it, and which were touched [n] bool.

    spec.py, steps 1 and 4. A hypergradient's s does not tell: rows count as touched if their bucket was.
    """
    if optimizer.config.scalar == "hypergradient":
        touched = optimizer.updates.index_select(0, buckets.places.first) > 0
        return as_float32(optimizer.scalar.index_select(0, buckets.rows)), touched
    second = _corrected(optimizer, buckets.places.first)
    if buckets.places.second is not None:
        second = torch.minimum(second, _corrected(optimizer, buckets.places.second))
    energy = as_float32(optimizer.energy.index_select(0, buckets.rows))
    return optimizer.scalar_of_energy(second.mean(1), energy, buckets.rows), energy > 0


def _corrected(optimizer: Basis, buckets: torch.Tensor) -> torch.Tensor:
    """V^ [n, D] of bucket rows; 0 where they were never touched."""
    updates = optimizer.updates.index_select(0, buckets).clamp(min=1)
    correction = bias_correction(optimizer.config.beta2, updates)
    return as_float32(optimizer.second.index_select(0, buckets)) / correction[:, None]


def _read_buckets(optimizer: Basis, buckets: ShardBuckets, colliding_rows: int) -> BucketReading:
    config = optimizer.config
    scalars, widest = np.zeros(0, np.float32), []
    if config.scalar != "none":
        scalar, touched = scalars_of(optimizer, buckets)
        scalars = scalar[touched].cpu().numpy()
        widest = _widest(scalars, buckets.of_row[touched].cpu().numpy(), buckets.ids[touched].cpu().numpy())
    clipped = config.scalar == "hypergradient"
    return BucketReading(
        colliding_rows=colliding_rows,
        loads=buckets.loads.cpu().numpy(),
        hottest=buckets.hottest,
        fullest=buckets.worst,
        scalars=scalars,
        bounds=(config.scalar_min, config.scalar_max) if clipped else None,
        widest=widest,
    )


def _widest(
    scalars: NDArray[np.float32], of_row: NDArray[np.int64], ids: NDArray[np.int64]
) -> list[tuple[int, float, list[int]]]:
    if not len(scalars):
        return []
    order = np.lexsort((-scalars, of_row))
    buckets, starts = np.unique(of_row[order], return_index=True)
    ends = np.append(starts[1:], len(order))
    largest, smallest = scalars[order[starts]], scalars[order[ends - 1]]
    spread = largest / np.maximum(smallest, np.finfo(np.float32).tiny)
    return [
        (int(buckets[place]), float(spread[place]), ids[order[starts[place] : ends[place]]].tolist())
        for place in np.argsort(-spread)[:NUM_WORST]
    ]


def _colliding(optimizer: Basis, rows: torch.Tensor) -> torch.Tensor:
    """[U] bool: whether another of ``rows`` [U] reads or writes a bucket of this one."""
    where = optimizer.buckets.of_rows(rows)
    seconds = where.first if where.second is None else where.second
    twice = seconds != where.first
    counts = torch.bincount(torch.cat([where.first, seconds[twice]]), minlength=optimizer.buckets.num_buckets)
    return (counts[where.first] > 1) | (counts[seconds] > 1)


def _sums_of_squares(values: torch.Tensor) -> torch.Tensor:
    """[U] float64 of values [U, D]."""
    return values.double().square().sum(1)
