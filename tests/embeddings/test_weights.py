"""Weights of 16 bits: sums in float32, rows updated in float32, and an expectation that rounding keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels import require_kernels

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.features import Pooling
from recsys_basis.embeddings.spec import BagsKernel, WeightDtype
from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.row_optimizers.storage import DTYPES
from recsys_basis.tables import Table, TableShard

every_kernel = pytest.mark.parametrize("kernel", ["torch", "cpp"])
every_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@pytest.fixture(autouse=True)
def _needs_kernels(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["kernel"] == "cpp":
        require_kernels()


def bags_of(
    kernel: BagsKernel, dtype: WeightDtype, rows: int, width: int, pooling: Pooling = "sum", **options: Any
) -> RowOptimizedEmbeddingBags:
    config = row_optimizer_defaults("sgd", **options)
    shard = TableShard.whole(Table("site", rows, width, 1))
    return RowOptimizedEmbeddingBags([shard], [0], config, pooling, kernel=kernel, weight_dtype=dtype)


@every_kernel
@every_dtype
def test_steps_of_less_than_half_a_place_move_weights_on_average(
    kernel: BagsKernel, dtype: WeightDtype
) -> None:
    """40 steps of SGD, each 1/16 of the distance to the next number below 1, which rounding would undo."""
    place = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    bags = bags_of(kernel, dtype, 64, 64, learning_rate=place / 16)
    bags.weights.fill_(1)
    rows = torch.arange(64)
    for _ in range(40):
        bags(rows, torch.arange(65)).backward(torch.ones(64, 64))
    assert torch.tensor(1 - place / 16).to(DTYPES[dtype]) == 1, "the nearest number is where it was"
    places = (1 - bags.weights.double()) / place
    assert torch.equal(places, places.round()) and len(places.unique()) > 4
    # 40 coins of chance 1/16 for each of 4096 weights: their mean has a standard deviation of 0.024.
    assert float(places.mean()) == pytest.approx(40 / 16, abs=5 * 0.024)


@every_kernel
@every_dtype
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_are_summed_in_float32(kernel: BagsKernel, dtype: WeightDtype, pooling: Pooling) -> None:
    """Pooled vectors and gradients of per-sample weights against a matrix product in float64."""
    generator = torch.Generator().manual_seed(4)
    bags = bags_of(kernel, dtype, 50, 19, pooling, learning_rate=0.0)
    bags.weights.copy_(torch.randn(50, 19, generator=generator))
    lengths = torch.tensor([0, 700, 1, 300])
    indices = torch.randint(0, 50, (1001,), generator=generator)
    psw = torch.rand(1001, generator=generator).requires_grad_()
    assignment = torch.zeros(4, 1001, dtype=torch.float64)
    assignment[torch.arange(4).repeat_interleave(lengths), torch.arange(1001)] = 1
    if pooling == "mean":
        assignment /= lengths.clamp(min=1)[:, None]
    exact = psw.detach().double().requires_grad_()
    expected = (assignment * exact) @ bags.weights.double()[indices]
    upstream = torch.randn(4, 19, generator=generator)
    expected.backward(upstream.double())

    pooled = bags(indices, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), psw)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled.double(), expected.detach(), rtol=2e-6, atol=1e-4)
    pooled.backward(upstream)
    torch.testing.assert_close(psw.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


@every_kernel
@every_dtype
def test_cowclip_measures_the_rows_that_are_kept(kernel: BagsKernel, dtype: WeightDtype) -> None:
    """Rows of norm 2 and 4, gradients of norm 2: cut to a quarter of the row's norm, and left alone."""
    clip = {"max_norm": None, "cowclip_ratio": 0.25, "cowclip_min_norm": 1e-5}
    bags = bags_of(kernel, dtype, 6, 4, learning_rate=1.0, clip=clip)
    bags.weights[3], bags.weights[5] = 1.0, 2.0
    bags(torch.tensor([5, 3]), torch.tensor([0, 1, 2])).backward(torch.ones(2, 4))
    assert bags.weights[3].tolist() == [0.75] * 4 and bags.weights[5].tolist() == [1.5] * 4
    assert not bags.weights[[0, 1, 2, 4]].any()


@every_kernel
@every_dtype
def test_numbers_that_fit_are_not_rounded_and_others_stay(kernel: BagsKernel, dtype: WeightDtype) -> None:
    bags = bags_of(kernel, dtype, 5, 3, learning_rate=0.5)
    bags.weights.copy_(torch.arange(15).view(5, 3))
    before = bags.weights.clone()
    for _ in range(3):
        bags(torch.tensor([1, 4, 1]), torch.tensor([0, 3])).backward(torch.ones(1, 3))
    assert torch.equal(bags.weights[[0, 2, 3]], before[[0, 2, 3]])
    assert torch.equal(bags.weights[1], before[1] - 3) and torch.equal(bags.weights[4], before[4] - 1.5)
