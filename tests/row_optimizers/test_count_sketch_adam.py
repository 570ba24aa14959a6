"""Count-sketch Adam against a loop in Python numbers, and against SparseAdam where nothing collides."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels import require_kernels
from support.rows import update_rows

from recsys_basis.kernels import rules
from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.base import RowOptimizer
from recsys_basis.row_optimizers.count_sketch_adam import CountSketchAdam
from recsys_basis.schema import ConfigError
from recsys_basis.segments import Segments
from recsys_basis.tables import Table, TableShard

RATE, DECAY, STEPS = 0.05, 0.3, 30
# float32 against float64; sums of signed changes cancel in M.
TOLERANCE = {"rtol": 5e-5, "atol": 5e-6}
WORD = (1 << 64) - 1


def make(shards: list[TableShard], **options: Any) -> CountSketchAdam:
    optimizer = create_row_optimizer(row_optimizer_defaults("count_sketch_adam", **options), shards)
    assert isinstance(optimizer, CountSketchAdam)
    return optimizer


def mix(value: int) -> int:
    value = ((value ^ value >> 33) * 0xFF51AFD7ED558CCD) & WORD
    value = ((value ^ value >> 33) * 0xC4CEB9FE1A85EC53) & WORD
    return value ^ value >> 33


def places_of(config: Any, table: Table, row: int) -> list[tuple[int, int]]:
    """(bucket row, sign) of a row in each block, from the text of count_sketch_adam.py."""
    n = table.rows_per_partition
    partition, place = divmod(row, n)
    width = max(1, round(config.state_ratio * n / 3))
    places = []
    for block in range(3):
        text = f"{table.name}/sketch/{config.hash_seed}/{block}/{partition}".encode()
        mixed = mix(place ^ int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1)
        bucket = 3 * width * partition + block * width + (mixed & (1 << 63) - 1) % width
        places.append((bucket, -1 if mixed >> 63 else 1))
    return places


@pytest.mark.parametrize(
    "options",
    [{"state_ratio": 0.5}, {"state_ratio": 2.0, "hash_seed": 5}, {"beta1": 0.0, "state_ratio": 0.2}],
)
@pytest.mark.parametrize("dim", [1, 3, 16])
def test_it_is_its_formula(dim: int, options: dict[str, Any], batches: Any) -> None:
    table = Table("site", 118, dim, 4)
    settings = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": DECAY} | options
    optimizer = make([TableShard.whole(table)], **settings)
    c = optimizer.config
    weights = torch.randn(120, dim, generator=torch.Generator().manual_seed(1))
    w = weights.double().numpy().copy()
    M: Any = defaultdict(lambda: np.zeros(dim))
    V: Any = defaultdict(lambda: np.zeros(dim))
    place = {row: places_of(c, table, row) for row in range(120)}

    def m(i: int) -> Any:
        return np.median([sign * M[bucket] for bucket, sign in place[i]], axis=0)

    def v(i: int) -> Any:
        return np.maximum(0, np.min([V[bucket] for bucket, _ in place[i]], axis=0))

    for t, (items, gradients) in enumerate(batches(120, dim, STEPS, 7), start=1):
        segments = Segments.of(items)
        summed = segments.sum(gradients)
        update_rows(optimizer, weights, segments.keys, summed, RATE)
        g = dict(zip(segments.keys.tolist(), summed.double().numpy(), strict=True))
        changes = {i: ((1 - c.beta1) * (g[i] - m(i)), (1 - c.beta2) * (g[i] ** 2 - v(i))) for i in g}
        for i, (change_m, change_v) in changes.items():
            for bucket, sign in place[i]:
                M[bucket] = M[bucket] + sign * change_m
                V[bucket] = V[bucket] + change_v
        for i in g:
            direction = g[i] if c.beta1 == 0 else m(i) / (1 - c.beta1**t)
            w[i] -= RATE * (direction / (np.sqrt(v(i) / (1 - c.beta2**t)) + c.eps) + DECAY * w[i])
    np.testing.assert_allclose(weights.double().numpy(), w, **TOLERANCE)
    second = np.array([V[bucket] for bucket in range(len(optimizer.second))])
    np.testing.assert_allclose(optimizer.second.double().numpy(), second, rtol=5e-5, atol=5e-6 * second.max())
    assert ("first_moment" in optimizer.state) == (c.beta1 > 0)


@pytest.mark.parametrize("dim", [3, 16])
def test_where_nothing_collides_it_is_sparse_adam(dim: int, batches: Any) -> None:
    # eps stands in another place than SparseAdam's: here it is too small to matter.
    optimizer = make([TableShard.whole(Table("site", 40, dim, 1))], state_ratio=300.0, eps=1e-20, beta2=0.99)
    buckets, _ = optimizer.sketch.of_rows(torch.arange(40))
    alone = torch.stack([(block[:, None] == block).sum(1) == 1 for block in buckets])
    assert (alone.sum(0) >= 2).all()  # so the median and the minimum are the row's own
    weights = torch.randn(40, dim, generator=torch.Generator().manual_seed(1))
    theirs = torch.nn.Parameter(weights.clone())
    sparse_adam = torch.optim.SparseAdam([theirs], lr=RATE, betas=(0.9, 0.99), eps=1e-20)
    for items, gradients in batches(40, dim, STEPS, 7):
        segments = Segments.of(items)
        update_rows(optimizer, weights, segments.keys, segments.sum(gradients), RATE)
        theirs.grad = torch.sparse_coo_tensor(items[None], gradients, theirs.shape, check_invariants=True)
        sparse_adam.step()
    torch.testing.assert_close(weights, theirs.detach(), **TOLERANCE)


@pytest.mark.parametrize("kernel", ["torch", "cpp"])
def test_second_moments_that_shrink_together_are_never_read_below_zero(kernel: str) -> None:
    """Ten rows in one bucket row take nine tenths of it each."""
    optimizer: RowOptimizer = make([TableShard.whole(Table("site", 10, 2, 1))], state_ratio=0.01, beta2=0.1)
    if kernel == "cpp":
        require_kernels()
    update = optimizer.update if kernel == "torch" else functools.partial(rules.update, optimizer)
    weights, rows = torch.zeros(10, 2), torch.arange(10)
    for gradient in (torch.ones(10, 2), torch.zeros(10, 2), torch.ones(10, 2)):
        update(weights, rows, gradient, RATE)
    assert optimizer.state["second_moment"].tensor.min() < 0
    assert torch.isfinite(weights).all()


def test_blocks_signs_partitions_and_seeds_are_independent() -> None:
    shard = TableShard.whole(Table("site", 40_000, 1, 2))
    sketches = [make([shard], hash_seed=seed).sketch for seed in (0, 1)]
    width = int(sketches[0].width[0])
    assert width == round(0.2 * 20_000 / 3)
    rows = torch.arange(20_000)
    (buckets, signs), (other, _) = sketches[0].of_rows(rows), sketches[1].of_rows(rows)
    second_partition, _ = sketches[0].of_rows(rows + 20_000)
    local = [buckets[block] - block * width for block in range(3)]
    for number, block in enumerate(local):
        assert int(block.min()) >= 0 and int(block.max()) < width
        assert abs(float(signs[number].mean())) < 0.03  # 4 standard deviations of 20,000 coins
        assert abs(float(signs[number][block % 2 == 0].mean())) < 0.04  # nor does the bucket tell it
    pairs = [(local[0], local[1]), (local[1], local[2]), (local[0], other[0])]
    pairs += [(local[0], second_partition[0] - 3 * width)]
    for left, right in pairs:
        assert int((left == right).sum()) < 60  # 15 are expected by chance


@pytest.mark.parametrize(("key", "value"), [("state_ratio", 0.0), ("hash_seed", -1), ("beta2", 1.0)])
def test_bounds(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"row_optimizer\.{key}\b"):
        row_optimizer_defaults("count_sketch_adam", **{key: value})
