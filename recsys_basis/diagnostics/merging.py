"""The readings of a table's shards, from all ranks, put together as plain numbers for a log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from recsys_basis.diagnostics.buckets import NUM_WORST
from recsys_basis.diagnostics.reading import BucketReading, ShardReading

PERCENTILES = (1, 25, 50, 75, 99)
LISTED_IDS = 20


def merge_readings(readings: Sequence[ShardReading]) -> dict[str, dict[str, Any]]:
    """By table; what a rule does not have is left out."""
    by_table: dict[str, list[ShardReading]] = {}
    for reading in readings:
        by_table.setdefault(reading.table, []).append(reading)
    names = sorted(by_table, key=lambda name: (len(name), name))  # C2 before C10
    return {name: _merge_table(by_table[name]) for name in names}


def _merge_table(shards: Sequence[ShardReading]) -> dict[str, Any]:
    of_rows = list({shard.first_row: shard for shard in shards}.values())
    rows_touched = sum(shard.rows_touched for shard in of_rows)
    merged: dict[str, Any] = {"rows_touched": rows_touched}
    weight = sum(shard.weight_square for shard in shards)
    if weight > 0:
        merged["update_to_weight"] = math.sqrt(sum(shard.update_square for shard in shards) / weight)
    merged["state"] = {}
    for name in shards[0].states:
        ranges = [shard.states[name] for shard in shards if name in shard.states]
        entries = sum(each.entries for each in ranges)
        if entries:
            smallest, largest = min(each.smallest for each in ranges), max(each.largest for each in ranges)
            underflowed = sum(each.underflowed for each in ranges) / entries
            merged["state"][name] = {"smallest": smallest, "largest": largest, "underflowed": underflowed}
    buckets = [shard.buckets for shard in of_rows if shard.buckets is not None]
    if buckets:
        merged |= _merge_buckets(buckets, rows_touched)
        merged |= _merge_scalars([shard.buckets for shard in shards if shard.buckets is not None])
    return merged


def _merge_buckets(buckets: Sequence[BucketReading], rows_touched: int) -> dict[str, Any]:
    """What rows share: the same for every block of their columns."""
    loads = np.concatenate([each.loads for each in buckets])
    fullest = sorted((each for shard in buckets for each in shard.fullest), key=lambda each: -len(each[1]))
    by_bucket: dict[int, list[int]] = {}
    for row, bucket in (each for shard in buckets for each in shard.hottest):
        by_bucket.setdefault(bucket, []).append(row)
    crowded = max(sorted(by_bucket), key=lambda bucket: len(by_bucket[bucket]))
    merged: dict[str, Any] = {
        "buckets": len(loads),
        "bucket_load_mean": float(loads.mean()),
        "bucket_load_max_over_mean": float(loads.max() / loads.mean()),
        "fullest_buckets": [
            {"bucket": bucket, "rows": len(ids), "ids": ids[:LISTED_IDS]}
            for bucket, ids in fullest[:NUM_WORST]
        ],
        "hottest": {
            "bucket": crowded,
            "ids": sorted(by_bucket[crowded]),
            "of": sum(len(ids) for ids in by_bucket.values()),
        },
    }
    if rows_touched:
        merged["collision_rate"] = sum(each.colliding_rows for each in buckets) / rows_touched
    return merged


def _merge_scalars(buckets: Sequence[BucketReading]) -> dict[str, Any]:
    """Of all shards: each block of columns has scalars of its own."""
    scalars = np.concatenate([each.scalars for each in buckets])
    if not len(scalars):
        return {}
    values = np.percentile(scalars, PERCENTILES)
    scalar = {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, values, strict=True)}
    if buckets[0].bounds is not None:
        low, high = buckets[0].bounds
        scalar["at_min"], scalar["at_max"] = float((scalars <= low).mean()), float((scalars >= high).mean())
    widest: dict[int, tuple[float, list[int]]] = {}
    for bucket, spread, ids in (each for shard in buckets for each in shard.widest):
        widest[bucket] = max(widest.get(bucket, (0.0, [])), (spread, ids))
    ordered = sorted(widest.items(), key=lambda item: -item[1][0])
    return {
        "scalar": scalar,
        "widest_buckets": [
            {"bucket": bucket, "spread": spread, "ids": ids[:LISTED_IDS]}
            for bucket, (spread, ids) in ordered[:NUM_WORST]
        ],
    }
