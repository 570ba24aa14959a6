"""SM3 on rows against the paper's dense algorithm in float64, zeros for the rows that a batch left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.rows import update_rows

from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.sm3 import SM3
from recsys_basis.segments import Segments
from recsys_basis.tables import Table, TableShard

RATE, EPS, DECAY, STEPS = 0.05, 1e-3, 0.3, 30
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}  # float32 against float64


def dense_sm3(
    blocks: list[slice], covers: str, weights: np.ndarray, steps: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """SM3-II on the matrix of each block of rows: weights, mu and c after all steps."""
    rows = np.zeros(len(weights))
    columns = np.zeros((len(blocks), weights.shape[1]))
    for touched, gradient in steps:
        full, step = np.zeros_like(weights), np.zeros_like(weights)
        full[touched] = gradient
        for block, column in zip(blocks, columns, strict=True):
            cover = (
                np.minimum(rows[block, None], column) if covers == "rows_and_columns" else rows[block, None]
            )
            nu = cover + full[block] ** 2
            rows[block] = nu.max(1)
            column[:] = nu.max(0)
            step[block] = full[block] / (np.sqrt(nu) + EPS)
        weights[touched] -= RATE * (step[touched] + DECAY * weights[touched])
    return weights, rows, columns


@pytest.mark.parametrize("covers", ["rows", "rows_and_columns"])
@pytest.mark.parametrize("dim", [1, 3, 16])
def test_lazy_sm3_is_the_paper_s_on_the_dense_gradient(covers: str, dim: int, batches: Any) -> None:
    tables = [Table("one", 24, dim, 1), Table("four", 40, dim, 4)]
    shards = [TableShard.whole(table) for table in tables]
    config = row_optimizer_defaults("sm3", covers=covers, eps=EPS, weight_decay=DECAY)
    optimizer = create_row_optimizer(config, shards)
    assert isinstance(optimizer, SM3)
    weights = torch.randn(64, dim, generator=torch.Generator().manual_seed(1))
    start, steps = weights.double().numpy().copy(), []
    for items, gradients in batches(64, dim, STEPS, 7):
        segments = Segments.of(items)
        summed = segments.sum(gradients)
        update_rows(optimizer, weights, segments.keys, summed, RATE)
        steps.append((segments.keys.numpy(), summed.double().numpy()))
    blocks = [slice(0, 24), *(slice(24 + 10 * p, 34 + 10 * p) for p in range(4))]
    expected, rows, columns = dense_sm3(blocks, covers, start, steps)
    np.testing.assert_allclose(weights.double().numpy(), expected, **TOLERANCE)
    np.testing.assert_allclose(optimizer.row_maxima.double().numpy(), rows, **TOLERANCE)
    if covers == "rows_and_columns":
        np.testing.assert_allclose(optimizer.column_maxima.double().numpy(), columns, **TOLERANCE)
        assert columns.min() > 0
    else:
        assert list(optimizer.state) == ["row_maxima"]


def test_of_width_one_it_is_adagrad(batches: Any) -> None:
    shards = [TableShard.whole(Table("site", 64, 1, 1))]
    ours = torch.randn(64, 1, generator=torch.Generator().manual_seed(1))
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = create_row_optimizer(row_optimizer_defaults("sm3", eps=EPS), shards)
    adagrad = torch.optim.Adagrad([theirs], lr=RATE, eps=EPS)
    for items, gradients in batches(64, 1, STEPS, 7):
        segments = Segments.of(items)
        update_rows(optimizer, ours, segments.keys, segments.sum(gradients), RATE)
        theirs.grad = torch.sparse_coo_tensor(items[None], gradients, theirs.shape, check_invariants=True)
        adagrad.step()
    torch.testing.assert_close(ours, theirs.detach(), **TOLERANCE)


def test_rows_bound_every_weight_s_adagrad_sum_and_at_most_d_times_the_mean(batches: Any) -> None:
    dim = 16
    shards = [TableShard.whole(Table("site", 64, dim, 1))]
    sums = {}
    for name in ("sm3", "adagrad", "rowwise_adagrad"):
        optimizer = create_row_optimizer(row_optimizer_defaults(name), shards)
        for items, gradients in batches(64, dim, STEPS, 7):
            segments = Segments.of(items)
            update_rows(optimizer, torch.zeros(64, dim), segments.keys, segments.sum(gradients), RATE)
        (sums[name],) = (state.tensor for state in optimizer.state.values())
    assert (sums["adagrad"] <= sums["sm3"][:, None] * (1 + 1e-5)).all()
    assert (sums["sm3"] <= dim * sums["rowwise_adagrad"] * (1 + 1e-5)).all()
    assert (sums["sm3"] >= sums["rowwise_adagrad"]).all()
