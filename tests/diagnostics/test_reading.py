"""What a report says of a step is what the step did."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from recsys_basis.diagnostics.buckets import ShardBuckets
from recsys_basis.diagnostics.reading import ShardReading, range_of, read_shards
from recsys_basis.diagnostics.watch import Watch
from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.row_optimizers.basis import Basis
from recsys_basis.tables import Table, TableShard

TABLES = [Table("a", 40, 4, 2), Table("b", 60, 4, 1)]


def train(rule: str, hold: bool = False, **options: Any) -> tuple[RowOptimizedEmbeddingBags, Watch, Any]:
    """Some steps on random ids, the last of them watched; the weights before it too."""
    torch.manual_seed(0)
    shards = [TableShard.whole(table) for table in TABLES]
    config = row_optimizer_defaults(rule, learning_rate=0.05, **options)
    bags = RowOptimizedEmbeddingBags(shards, [0, 1], config, hold_gradients=hold)
    bags.weights.normal_()
    watch, before = None, bags.weights
    for step in range(12):
        if step == 11:
            watch, before = Watch(bags), bags.weights.clone()
        indices = torch.cat([torch.randint(40, (16,)), torch.randint(60, (16,))])
        (bags(indices, torch.arange(33)) * torch.randn(16, 8)).sum().backward()
        bags.apply_held()
    assert watch is not None
    watch.end()
    return bags, watch, before


def read(bags: RowOptimizedEmbeddingBags, watch: Watch) -> list[ShardReading]:
    optimizer = bags.row_optimizer
    buckets = [ShardBuckets.of(optimizer, index) for index in (0, 1)] if isinstance(optimizer, Basis) else []
    return list(read_shards(watch, buckets))


@pytest.mark.parametrize("hold", [False, True])
def test_updates_and_weights_are_those_of_the_step(hold: bool) -> None:
    bags, watch, before = train("adam", hold)
    assert bags.observer is None
    a, b = read(bags, watch)
    changed = (bags.weights != before).any(dim=1)
    for reading, rows in ((a, slice(0, 40)), (b, slice(40, 100))):
        assert reading.buckets is None
        assert reading.rows_touched == int(changed[rows].sum()) > 0
        own = before[rows][changed[rows]].double()
        assert reading.weight_square == pytest.approx(float(own.square().sum()))
        change = bags.weights[rows][changed[rows]].double() - own
        assert reading.update_square == pytest.approx(float(change.square().sum()), rel=1e-5)
        assert set(reading.states) == {"first_moment", "second_moment"}


def test_ranges_leave_out_rows_that_were_never_touched() -> None:
    tiny = torch.finfo(torch.float32).tiny
    state = torch.tensor([[0.0, 0.0], [3.0, -0.25], [0.0, tiny / 4], [tiny, 1.0]])
    found = range_of(state)
    assert (found.entries, found.underflowed) == (6, 2)
    assert (found.smallest, found.largest) == (tiny / 4, 3.0)
    nothing = range_of(torch.zeros(3, 2))
    assert (nothing.entries, nothing.underflowed, nothing.largest) == (0, 0, 0.0)
    assert math.isinf(nothing.smallest)
    half = range_of(torch.tensor([1.0, 2.0**-20], dtype=torch.float16))  # below 2^-14
    assert half.underflowed == 1
    codes = range_of(torch.tensor([0, 192, 1, 255], dtype=torch.uint8))  # log8: 0 is a row never touched
    assert (codes.entries, codes.underflowed) == (3, 0)
    assert (codes.smallest, codes.largest) == (pytest.approx(2 ** (1 / 3 - 64)), pytest.approx(2.0**21))


@pytest.mark.parametrize(
    "options",
    [
        {"scalar": "energy"},
        {"scalar": "energy", "hash": "double"},
        {"scalar": "energy", "energy_correction": "none"},
        {"scalar": "energy", "moment_dtype": "bfloat16", "scalar_dtype": "log8"},
        {"scalar": "hypergradient", "hypergradient_rate": 400.0, "scalar_dtype": "bfloat16"},
        {"scalar": "hypergradient", "hypergradient_rate": 400.0},
        {"scalar": "none"},
    ],
)
def test_buckets_and_scalars(options: dict[str, Any]) -> None:
    bags, watch, _ = train("basis", rows_per_bucket=5.0, **options)
    optimizer = bags.row_optimizer
    assert isinstance(optimizer, Basis)
    where = optimizer.buckets.of_rows(torch.arange(100))
    places = [
        {int(where.first[row]), int((where.first if where.second is None else where.second)[row])}
        for row in range(100)
    ]
    touched = set(watch.rows.tolist())
    energy = None
    if options["scalar"] == "energy":
        codes = optimizer.energy.double()
        energy = (
            torch.where(codes > 0, 2 ** (-64 + codes / 3), 0)
            if optimizer.energy.dtype == torch.uint8
            else codes
        )
        if optimizer.config.energy_correction == "table":
            energy /= 1 - optimizer.config.energy_decay**12
    for reading, rows in zip(read(bags, watch), (range(40), range(40, 100)), strict=True):
        found = reading.buckets
        assert found is not None
        assert ("energy" in reading.states) == (energy is not None) and "updates" not in reading.states
        own = touched & set(rows)
        colliding = [row for row in own if any(places[row] & places[other] for other in touched - {row})]
        assert found.colliding_rows == len(colliding)
        scalars = {}
        for row in rows:
            if energy is not None and energy[row] > 0:
                each = []
                for bucket in places[row]:
                    second = optimizer.second[bucket].double().numpy()
                    each.append(second / (1 - optimizer.config.beta2 ** int(optimizer.updates[bucket])))
                scalars[row] = math.sqrt(np.min(each, axis=0).mean() / float(energy[row]))
            if options["scalar"] == "hypergradient" and optimizer.updates[where.first[row]] > 0:
                scalars[row] = float(optimizer.scalar[row])
        np.testing.assert_allclose(sorted(found.scalars), sorted(scalars.values()), rtol=1e-5)
        if options["scalar"] == "hypergradient":
            assert found.bounds == (0.1, 10.0)
        else:
            assert found.bounds is None
        if not scalars:
            assert found.widest == []
            continue
        spreads: dict[int, list[float]] = {}
        start = 0 if rows.start == 0 else optimizer.buckets_of_shard(optimizer.shards[0], "second_moment")[0]
        for row, scalar in scalars.items():
            spreads.setdefault(int(where.first[row]) - start, []).append(scalar)
        expected = sorted((max(each) / min(each) for each in spreads.values()), reverse=True)[:3]
        assert [spread for _, spread, _ in found.widest] == pytest.approx(expected, rel=1e-5)
        bucket, _, ids = found.widest[0]
        table = TABLES[0] if rows.start == 0 else TABLES[1]
        by_scalar = [scalars[int(table.rows_of(torch.tensor(each))) + rows.start] for each in ids]
        assert by_scalar == sorted(spreads[bucket], reverse=True)
