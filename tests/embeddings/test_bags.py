"""Lookup, summed duplicates and per-sample gradients against autograd in float64 on a dense copy."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from support.kernels import require_kernels

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.features import Pooling
from recsys_basis.embeddings.spec import BagsKernel
from recsys_basis.errors import NonFiniteError
from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.tables import Table, TableShard

MakeBags = Callable[..., RowOptimizedEmbeddingBags]

SIZES = (5, 11, 3)


@pytest.fixture(params=["torch", "cpp"])
def make_bags(request: pytest.FixtureRequest) -> MakeBags:
    """Bags of each kernel in turn."""
    if request.param == "cpp":
        require_kernels()
    return functools.partial(bags_of, request.param)


def bags_of(
    kernel: BagsKernel, pooling: Pooling = "sum", width: int = 4, hold: bool = False
) -> RowOptimizedEmbeddingBags:
    shards = [TableShard.whole(Table(f"t{i}", n, width, 1)) for i, n in enumerate(SIZES)]
    # Features 0 and 2 share table 1, so that one row may come from two features.
    bags = RowOptimizedEmbeddingBags(
        shards, [1, 0, 1, 2], row_optimizer_defaults("sgd", learning_rate=1.0), pooling, hold, kernel=kernel
    )
    bags.weights.copy_(torch.randn(bags.weights.shape, generator=torch.Generator().manual_seed(0)))
    return bags


def make_input(
    batch_size: int, seed: int, longest: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (4 * batch_size,), generator=generator)  # empty bags occur
    rows_of_feature = torch.tensor([SIZES[1], SIZES[0], SIZES[1], SIZES[2]])
    limits = rows_of_feature.repeat_interleave(batch_size).repeat_interleave(lengths)
    indices = (torch.rand(len(limits), generator=generator) * limits).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return indices, offsets, torch.rand(len(limits), generator=generator)


def oracle(
    bags: RowOptimizedEmbeddingBags,
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    psw: torch.Tensor,
) -> torch.Tensor:
    """Bag by bag, from the definition."""
    starts = [SIZES[0], 0, SIZES[0], SIZES[0] + SIZES[1]]
    batch_size = (len(offsets) - 1) // 4
    pooled = []
    for sample in range(batch_size):
        for feature in range(4):
            bag = feature * batch_size + sample
            items = range(int(offsets[bag]), int(offsets[bag + 1]))
            total = torch.zeros(weights.shape[1], dtype=weights.dtype)
            for item in items:
                total = total + psw[item] * weights[starts[feature] + int(indices[item])]
            pooled.append(total / max(1, len(items)) if bags.features.pooling == "mean" else total)
    return torch.stack(pooled).view(batch_size, -1)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_forward_and_gradients_match_float64_autograd(
    make_bags: MakeBags, pooling: Pooling, weighted: bool, index_type: torch.dtype, width: int
) -> None:
    bags = make_bags(pooling, width)
    indices, offsets, psw = make_input(7, seed=width)
    exact = bags.weights.double().requires_grad_()
    exact_psw = (psw.double() if weighted else torch.ones(len(psw)).double()).requires_grad_()
    expected = oracle(bags, exact, indices, offsets, exact_psw)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    expected.backward(upstream.double())

    weights_before = bags.weights.clone()
    psw_leaf = psw.clone().requires_grad_() if weighted else None
    pooled = bags(indices.to(index_type), offsets.to(index_type), psw_leaf)
    pooled.backward(upstream)

    torch.testing.assert_close(pooled.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    # SGD with rate 1: the change of the weights is the summed gradient.
    torch.testing.assert_close((weights_before - bags.weights).double(), exact.grad, rtol=1e-5, atol=1e-5)
    if psw_leaf is not None:
        torch.testing.assert_close(psw_leaf.grad.double(), exact_psw.grad, rtol=1e-5, atol=1e-6)


def test_update_sees_each_row_once_with_its_summed_gradient(make_bags: MakeBags) -> None:
    bags = make_bags(hold=True)
    indices = torch.tensor([2, 2, 0, 2])  # table 1 row 2 thrice: twice by feature 0, once by feature 2
    offsets = torch.tensor([0, 2, 3, 4, 4])
    bags(indices, offsets).sum().backward()
    assert bags.held is not None
    rows, gradients = bags.held.rows, bags.held.sums
    assert rows.tolist() == [0, SIZES[0] + 2]
    assert gradients.tolist() == [[1.0] * 4, [3.0] * 4]


def test_held_gradients_change_nothing_until_applied(make_bags: MakeBags) -> None:
    held, direct = make_bags(hold=True), make_bags()
    indices, offsets, _ = make_input(5, seed=1)
    before = held.weights.clone()
    for bags in (held, direct):
        bags(indices, offsets).square().sum().backward()
    assert torch.equal(held.weights, before)
    held.apply_held()
    assert torch.equal(held.weights, direct.weights)
    held.apply_held()
    assert torch.equal(held.weights, direct.weights)


def test_held_gradients_do_not_follow_the_memory_of_the_batch(make_bags: MakeBags) -> None:
    held, direct = make_bags(hold=True), make_bags()
    indices, offsets, _ = make_input(5, seed=1)
    for bags in (held, direct):
        pooled = bags(indices, offsets)
        upstream = torch.ones_like(pooled)
        pooled.backward(upstream)
        upstream.zero_()
    held.apply_held()
    assert torch.equal(held.weights, direct.weights)


def test_learning_rate_is_read_at_each_update(make_bags: MakeBags) -> None:
    bags = make_bags()
    before = bags.weights.clone()
    bags.learning_rate = 0.0
    indices, offsets, _ = make_input(5, seed=1)
    bags(indices, offsets).sum().backward()
    assert torch.equal(bags.weights, before)


def test_no_gradient_of_table_size_exists(make_bags: MakeBags) -> None:
    bags = make_bags()
    indices, offsets, _ = make_input(5, seed=1)
    bags(indices, offsets).sum().backward()
    assert bags.weights.grad is None and not bags.weights.requires_grad
    assert list(bags.parameters()) == []


@pytest.mark.parametrize("row", [-1, 11, 4_000_000_000])
def test_row_out_of_range_names_table_and_row_and_changes_nothing(make_bags: MakeBags, row: int) -> None:
    bags = make_bags()
    before = bags.weights.clone()
    with pytest.raises(IndexError, match=rf"table t1: row {row} .*0\.\.10"):
        bags(torch.tensor([0, row]), torch.tensor([0, 0, 1, 2, 2]))
    assert torch.equal(bags.weights, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_non_finite_gradient_names_the_table_and_changes_nothing(make_bags: MakeBags, value: float) -> None:
    bags = make_bags()
    before = bags.weights.clone()
    pooled = bags(torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 2, 3, 4]))
    upstream = torch.ones_like(pooled)
    upstream[0, -1] = value  # the last feature is table t2's
    pooled.backward(upstream)
    assert torch.equal(bags.weights, before)
    indices, offsets = torch.tensor([0]), torch.tensor([0, 1, 1, 1, 1])
    with pytest.raises(NonFiniteError, match="table t2: non-finite gradient"):
        bags(indices, offsets)
    assert bags.take_fault() == "table t2: non-finite gradient" and bags.take_fault() is None
    bags(indices, offsets)


def test_empty_batch(make_bags: MakeBags) -> None:
    bags = make_bags()
    before = bags.weights.clone()
    pooled = bags(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert pooled.shape == (0, 16)
    pooled.sum().backward()
    assert torch.equal(bags.weights, before)
