"""Adafactor on rows: torch's where every row comes in every batch, and a float64 loop where they do not."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from support.rows import update_rows

from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.adafactor import Adafactor
from recsys_basis.schema import ConfigError
from recsys_basis.segments import Segments
from recsys_basis.tables import Table, TableShard

RATE, DECAY, STEPS = 0.05, 0.3, 30
TOLERANCE = {
    "torch": {"rtol": 5e-5, "atol": 5e-6},  # torch's divides by another order of roots; 30 steps
    "float64": {"rtol": 2e-5, "atol": 2e-6},
}


@pytest.mark.parametrize("update_clip", [1.0, 1.5])
@pytest.mark.parametrize("dim", [2, 16])
def test_on_batches_that_touch_every_row_it_is_torch_s(dim: int, update_clip: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(24, dim, generator=generator)
    theirs = torch.nn.Parameter(weights.clone())
    config = row_optimizer_defaults("adafactor", weight_decay=DECAY, update_clip=update_clip)
    ours = create_row_optimizer(config, [TableShard.whole(Table("site", 24, dim, 1))])
    # torch's step is lr * max(eps2, RMS(weights)), and lr at most 1 / sqrt(t): this makes it RATE at every t.
    scale = 1000.0
    adafactor = torch.optim.Adafactor(
        [theirs], lr=RATE / scale, eps=(1e-30, scale), d=update_clip, weight_decay=DECAY * scale
    )
    for _ in range(STEPS):
        gradient = torch.randn(24, dim, generator=generator)
        gradient *= 10 ** torch.empty(24, 1).uniform_(-1, 1, generator=generator)
        update_rows(ours, weights, torch.arange(24), gradient, RATE)
        theirs.grad = gradient.clone()
        adafactor.step()
    torch.testing.assert_close(weights, theirs.detach(), **TOLERANCE["torch"])


@pytest.mark.parametrize(
    "options", [{}, {"decay_power": 0.5}, {"beta2": 0.9}, {"eps": 0.1, "update_clip": 0.5}]
)
@pytest.mark.parametrize("dim", [1, 3, 16])
def test_it_is_its_formula_partition_by_partition(dim: int, options: dict[str, Any], batches: Any) -> None:
    config: Any = row_optimizer_defaults("adafactor", weight_decay=DECAY, **options)
    shards = [TableShard.whole(Table("one", 24, dim, 1)), TableShard.whole(Table("four", 40, dim, 4))]
    optimizer = create_row_optimizer(config, shards)
    assert isinstance(optimizer, Adafactor)
    weights = torch.randn(64, dim, generator=torch.Generator().manual_seed(1))
    w, R, C = weights.double().numpy().copy(), np.zeros(64), np.zeros((5, dim))
    t: Any = defaultdict(int)

    def amount(of: Any) -> float:
        t[of] += 1
        if config.beta2 is None:
            return float(t[of] ** -config.decay_power)
        return 1.0 if t[of] == 1 else 1 - config.beta2

    clipped = 0
    for items, gradients in batches(64, dim, STEPS, 7):
        segments = Segments.of(items)
        summed = segments.sum(gradients)
        update_rows(optimizer, weights, segments.keys, summed, RATE)
        g = dict(zip(segments.keys.tolist(), summed.double().numpy(), strict=True))
        for p in range(5):
            rows = [i for i in g if (0 if i < 24 else 1 + (i - 24) // 10) == p]
            if not rows:
                continue
            for i in rows:
                R[i] += amount(("row", i)) * ((g[i] ** 2).mean() + config.eps - R[i])
            square = np.mean([g[i] ** 2 for i in rows], axis=0)
            C[p] += amount(("column", p)) * (square + config.eps - C[p])
            u = {i: g[i] / np.sqrt(R[i] * C[p] / C[p].mean()) for i in rows}
            size = math.sqrt(np.mean([u[i] ** 2 for i in rows]))
            clipped += size > config.update_clip
            for i in rows:
                w[i] -= RATE * (u[i] / max(1, size / config.update_clip) + DECAY * w[i])
    assert clipped > 5
    np.testing.assert_allclose(weights.double().numpy(), w, **TOLERANCE["float64"])
    np.testing.assert_allclose(optimizer.row_average.double().numpy(), R, **TOLERANCE["float64"])
    np.testing.assert_allclose(optimizer.column_average.double().numpy(), C, **TOLERANCE["float64"])
    assert ("row_updates" in optimizer.state) == (config.beta2 is None)


def test_columns_of_very_different_size_stay_finite() -> None:
    optimizer = create_row_optimizer(
        row_optimizer_defaults("adafactor"), [TableShard.whole(Table("a", 2, 2, 1))]
    )
    weights = torch.zeros(2, 2)
    for gradient in ([[1e15, 0.0], [0.0, 0.0]], [[0.0, 1e-18], [1e-18, 0.0]]):
        update_rows(optimizer, weights, torch.arange(2), torch.tensor(gradient), RATE)
        assert torch.isfinite(weights).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [("decay_power", 0.0), ("decay_power", 1.1), ("beta2", 1.0), ("eps", 1e-40), ("update_clip", 0.0)],
)
def test_bounds(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"row_optimizer\.{key}\b"):
        row_optimizer_defaults("adafactor", **{key: value})
