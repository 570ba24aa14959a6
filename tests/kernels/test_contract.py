"""Every rule and form by C++ against plain PyTorch, in whole steps: lookup, sums of duplicates, update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels import require_kernels
from support.row_variants import IDS, VARIANTS

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.features import Pooling
from recsys_basis.embeddings.spec import BagsKernel
from recsys_basis.kernels.rules import missing_rule
from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.tables import Table, TableShard

STEPS = 20
NUM_FEATURES = 5
BATCH_SIZE = 40
# Relative to the largest number of each tensor: float32 rounds to 6e-8, sums of D and of duplicates run in
# another order, and 20 steps feed the rounding of one into the next.
TOLERANCE = {
    "pooled": 1e-5,
    "weights": 1e-5,
    "sum_of_squares": 2e-6,  # sums of squares: no cancellation
    "row_maxima": 2e-6,
    "column_maxima": 2e-6,
    "row_average": 2e-6,
    "column_average": 2e-6,
    "second_moment": 2e-6,
    "energy": 2e-6,
    "first_moment": 1e-5,  # sums of signed numbers cancel
    "scalar": 1e-5,  # an inner product of signed numbers moves it
    "updates": 0,  # counts
    "table_updates": 0,
    "row_updates": 0,
    "column_updates": 0,
}

VISIBLE = {
    "learning_rate": 0.05,
    "weight_decay": 0.1,
    "eps": 0.01,
    "scalar_min": 0.99,
    "scalar_max": 1.01,
}
"""Settings under which each of these keys changes the result: s reaches both clips."""


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    require_kernels()


@pytest.fixture(autouse=True)
def _restore_threads() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make_bags(
    kernel: BagsKernel, name: str, options: dict[str, Any], width: int, pooling: Pooling
) -> RowOptimizedEmbeddingBags:
    sizes = (("site", 118, 4), ("device", 3, 1), ("user", 61, 2), ("page", 40, 4))
    shards = [TableShard.whole(Table(table, ids, width, partitions)) for table, ids, partitions in sizes]
    config = row_optimizer_defaults(name, **options)
    config = config.model_copy(update={key: value for key, value in VISIBLE.items() if hasattr(config, key)})
    # Features 1 and 4 share a table: a row may come from both.
    bags = RowOptimizedEmbeddingBags(shards, [0, 2, 1, 3, 2], config, pooling, kernel=kernel)
    bags.weights.copy_(torch.randn(bags.weights.shape, generator=torch.Generator().manual_seed(99)))
    return bags


def batch(bags: RowOptimizedEmbeddingBags, step: int, weighted: bool) -> tuple[torch.Tensor, ...]:
    """Ids with repeats in multi-hot and empty bags, and a gradient of each scale."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (NUM_FEATURES * BATCH_SIZE,), generator=generator)
    sizes = bags.features.sizes.repeat_interleave(BATCH_SIZE).repeat_interleave(lengths)
    # Squared, so that low rows repeat; every other step has int32 ids.
    indices = (torch.rand(len(sizes), generator=generator) ** 2 * sizes).to(
        (torch.int32, torch.int64)[step % 2]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = torch.rand(len(sizes), generator=generator) if weighted else None
    gradient = torch.randn(BATCH_SIZE, NUM_FEATURES * bags.embedding_dim, generator=generator)
    scale = 10 ** torch.empty(BATCH_SIZE, 1).uniform_(-1, 1, generator=generator)
    return indices, offsets, weights, scale * gradient


def run(bags: RowOptimizedEmbeddingBags, weighted: bool) -> dict[str, torch.Tensor]:
    """All that STEPS steps leave: weights, state, the last pooled vectors."""
    pooled = torch.empty(0)
    for step in range(STEPS):
        indices, offsets, weights, gradient = batch(bags, step, weighted)
        pooled = bags(indices, offsets, weights)
        pooled.backward(gradient)
    states = {name: state.tensor for name, state in bags.row_optimizer.state.items()}
    return {"pooled": pooled.detach(), "weights": bags.weights} | states


IN_CPP = [
    pytest.param(name, options, id=case)
    for (name, options), case in zip(VARIANTS, IDS, strict=True)
    if missing_rule(row_optimizer_defaults(name, **options)) is None
]


@pytest.mark.parametrize("width", [1, 3, 16, 100, 128])
@pytest.mark.parametrize(("name", "options"), IN_CPP)
def test_cpp_is_close_to_torch_and_the_same_bits_for_any_threads(
    name: str, options: dict[str, Any], width: int
) -> None:
    pooling: Pooling = "mean" if width == 16 else "sum"
    weighted = width in (3, 100)
    expected = run(make_bags("torch", name, options, width, pooling), weighted)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(make_bags("cpp", name, options, width, pooling), weighted))
    for key, tensor in expected.items():
        assert torch.equal(results[0][key], results[1][key]) and torch.equal(
            results[0][key], results[2][key]
        ), key
        difference = float((results[0][key].double() - tensor.double()).abs().max())
        assert difference <= TOLERANCE[key] * float(tensor.abs().max()), (key, difference)
