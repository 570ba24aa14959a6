"""Shards of a table on several ranks give one set of numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recsys_basis.diagnostics.merging import merge_readings
from recsys_basis.diagnostics.reading import BucketReading, ShardReading, StateRange


def buckets(colliding: int, loads: list[int], scalars: list[float], first: int) -> BucketReading:
    return BucketReading(
        colliding_rows=colliding,
        loads=np.array(loads),
        hottest=[(first, first), (first + 2, first + 1)],
        fullest=[(first, list(range(max(loads))))],
        scalars=np.array(scalars, np.float32),
        bounds=(0.5, 2.0),
        widest=[(first, max(scalars) / min(scalars), [first])],
    )


ONE = ShardReading(
    "a", 0, 10, 4.0, 1.0, {"v": StateRange(10, 1, 1e-3, 5.0), "head": StateRange(0, 0, math.inf, 0.0)},
    buckets(3, [5, 7], [0.5, 1.0], 0),
)  # fmt: skip
TWO = ShardReading(
    "a", 64, 30, 12.0, 0.0, {"v": StateRange(30, 1, 1e-4, 2.0)}, buckets(9, [9, 3], [2.0, 3.0], 1)
)  # fmt: skip
PLAIN = ShardReading("b", 0, 0, 0.0, 0.0, {}, None)


def test_two_shards_of_a_table() -> None:
    merged = merge_readings([TWO, PLAIN, ONE])
    assert merged["b"] == {"rows_touched": 0, "state": {}}
    a = merged["a"]
    assert a["rows_touched"] == 40 and a["update_to_weight"] == pytest.approx(0.25)
    assert a["state"] == {"v": {"smallest": 1e-4, "largest": 5.0, "underflowed": 0.05}}
    assert a["collision_rate"] == pytest.approx(12 / 40)
    assert (a["buckets"], a["bucket_load_mean"], a["bucket_load_max_over_mean"]) == (4, 6.0, 1.5)
    assert a["fullest_buckets"][0] == {"bucket": 1, "rows": 9, "ids": list(range(9))}
    assert a["hottest"] == {"bucket": 1, "ids": [1, 2], "of": 4}
    assert a["scalar"]["p50"] == 1.5 and (a["scalar"]["at_min"], a["scalar"]["at_max"]) == (0.25, 0.5)
    assert a["widest_buckets"][0] == {"bucket": 0, "spread": 2.0, "ids": [0]}


def test_blocks_of_columns_count_their_rows_and_buckets_once() -> None:
    """Another block of the same rows: same rows and buckets, columns, ranges and scalars of its own."""
    block = ShardReading(
        "a", 0, 10, 12.0, 3.0, {"v": StateRange(30, 3, 1e-4, 2.0)}, buckets(3, [5, 7], [1.5, 4.5], 0)
    )
    one, both = (merge_readings(shards)["a"] for shards in ([ONE], [ONE, block]))
    for key in ("rows_touched", "collision_rate", "buckets", "fullest_buckets", "hottest"):
        assert both[key] == one[key]
    assert both["update_to_weight"] == pytest.approx(0.5)
    assert both["state"]["v"] == {"smallest": 1e-4, "largest": 5.0, "underflowed": 0.1}
    assert both["scalar"]["p50"] == 1.25
    assert both["widest_buckets"] == [{"bucket": 0, "spread": 3.0, "ids": [0]}]
