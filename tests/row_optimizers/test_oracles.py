"""The rivals over many steps against torch, FBGEMM, or a float64 loop of the formula.

The oracle of ``basis`` is in basis/test_reference.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from support.rows import update_rows

from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.segments import Segments
from recsys_basis.tables import Table, TableShard

NUM_STEPS = 30
LEARNING_RATE = 0.05
TOLERANCE = {
    # Same float32 formula, another order of operations: a few units in the last place a step.
    "torch": {"rtol": 2e-5, "atol": 2e-6},
    "fbgemm": {"rtol": 2e-5, "atol": 2e-6},
    # float32 against float64.
    "float64": {"rtol": 2e-5, "atol": 2e-6},
}
NUM_IDS = (40, 24)
every_width = pytest.mark.parametrize("dim", [1, 3, 16, 100])
every_fbgemm_width = pytest.mark.parametrize("dim", [4, 16, 100])  # multiples of 4
with_decay = pytest.mark.parametrize("weight_decay", [0.0, 0.3])


def shards_of_width(dim: int) -> list[TableShard]:
    return [TableShard.whole(Table(f"table{i}", num_ids, dim, 1)) for i, num_ids in enumerate(NUM_IDS)]


def initial_weights(dim: int) -> torch.Tensor:
    return torch.randn(sum(NUM_IDS), dim, generator=torch.Generator().manual_seed(1))


def run_ours(
    name: str, dim: int, batches: Any, **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weights and state after all steps, duplicates summed first, as the embedding module does."""
    optimizer = create_row_optimizer(row_optimizer_defaults(name, **options), shards_of_width(dim))
    weights = initial_weights(dim)
    for items, gradients in batches(sum(NUM_IDS), dim, NUM_STEPS, 7):
        segments = Segments.of(items)
        update_rows(optimizer, weights, segments.keys, segments.sum(gradients), LEARNING_RATE)
    return weights, {key: state.tensor for key, state in optimizer.state.items()}


def decay_touched(weights: torch.Tensor, items: torch.Tensor, weight_decay: float) -> None:
    """What no library does to sparse rows on a CPU; the gradients here do not depend on the weights."""
    with torch.no_grad():
        weights[items.unique()] *= 1 - LEARNING_RATE * weight_decay


def run_torch(
    optimizer_class: Any, dim: int, weight_decay: float, batches: Any, **options: Any
) -> tuple[torch.Tensor, Any]:
    """Weights and state after all steps; torch sums the duplicates of a sparse gradient itself."""
    weights = torch.nn.Parameter(initial_weights(dim))
    optimizer = optimizer_class([weights], lr=LEARNING_RATE, **options)
    for items, gradients in batches(sum(NUM_IDS), dim, NUM_STEPS, 7):
        decay_touched(weights, items, weight_decay)
        weights.grad = torch.sparse_coo_tensor(items[None], gradients, weights.shape, check_invariants=True)
        optimizer.step()
    return weights.detach(), optimizer.state[weights]


@every_width
@with_decay
def test_adam_is_sparse_adam(dim: int, weight_decay: float, batches: Any) -> None:
    ours, state = run_ours("adam", dim, batches, weight_decay=weight_decay, beta1=0.8, beta2=0.99, eps=1e-3)
    theirs, expected = run_torch(
        torch.optim.SparseAdam, dim, weight_decay, batches, betas=(0.8, 0.99), eps=1e-3
    )
    torch.testing.assert_close(ours, theirs, **TOLERANCE["torch"])
    torch.testing.assert_close(state["first_moment"], expected["exp_avg"], **TOLERANCE["torch"])
    torch.testing.assert_close(state["second_moment"], expected["exp_avg_sq"], **TOLERANCE["torch"])
    assert state["updates"].tolist() == [expected["step"]] * len(NUM_IDS)


def test_adam_counts_a_step_without_rows_as_sparse_adam_does(batches: Any) -> None:
    optimizer = create_row_optimizer(row_optimizer_defaults("adam"), shards_of_width(3))
    ours, theirs = initial_weights(3), torch.nn.Parameter(initial_weights(3))
    sparse_adam = torch.optim.SparseAdam([theirs], lr=LEARNING_RATE)
    for number, (items, gradients) in enumerate(batches(sum(NUM_IDS), 3, 12, 7)):
        kept = 0 if number % 3 == 0 else len(items)
        segments = Segments.of(items[:kept])
        update_rows(optimizer, ours, segments.keys, segments.sum(gradients[:kept]), LEARNING_RATE)
        theirs.grad = torch.sparse_coo_tensor(
            items[None, :kept], gradients[:kept], theirs.shape, check_invariants=True
        )
        sparse_adam.step()
    torch.testing.assert_close(ours, theirs.detach(), **TOLERANCE["torch"])


@every_width
@with_decay
def test_adagrad_is_torch_adagrad(dim: int, weight_decay: float, batches: Any) -> None:
    ours, state = run_ours("adagrad", dim, batches, weight_decay=weight_decay, eps=1e-3)
    theirs, expected = run_torch(torch.optim.Adagrad, dim, weight_decay, batches, eps=1e-3)
    torch.testing.assert_close(ours, theirs, **TOLERANCE["torch"])
    torch.testing.assert_close(state["sum_of_squares"], expected["sum"], **TOLERANCE["torch"])


@every_width
@with_decay
def test_sgd_is_torch_sgd(dim: int, weight_decay: float, batches: Any) -> None:
    ours, state = run_ours("sgd", dim, batches, weight_decay=weight_decay)
    theirs, _ = run_torch(torch.optim.SGD, dim, weight_decay, batches)
    torch.testing.assert_close(ours, theirs, **TOLERANCE["torch"])
    assert state == {}


def run_fbgemm(
    optimizer: EmbOptimType, dim: int, weight_decay: float, batches: Any, **options: Any
) -> tuple[torch.Tensor, Any]:
    """Weights and per-table state; every item is a bag of its own table, so backward meets repeated rows.

    FBGEMM's CPU kernels take a weight_decay and ignore it, so it is applied here.
    """
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(num_ids, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for num_ids in NUM_IDS],
        optimizer=optimizer,
        learning_rate=LEARNING_RATE,
        **options,
    )
    for weights, start in zip(module.split_embedding_weights(), (0, NUM_IDS[0]), strict=True):
        weights.copy_(initial_weights(dim)[start : start + len(weights)])
    for items, gradients in batches(sum(NUM_IDS), dim, NUM_STEPS, 7):
        for weights, of_table in zip(
            module.split_embedding_weights(),
            (items[items < NUM_IDS[0]], items[items >= NUM_IDS[0]] - NUM_IDS[0]),
            strict=True,
        ):
            decay_touched(weights, of_table, weight_decay)
        # One bag of one item or none for each (table, item).
        in_table = torch.stack([items < NUM_IDS[0], items >= NUM_IDS[0]])
        indices = torch.cat([items[in_table[0]], items[in_table[1]] - NUM_IDS[0]])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), in_table.view(-1).cumsum(0)])
        pooled = module(indices, offsets).view(len(items), 2, dim)
        (pooled * gradients[:, None]).sum().backward()
    return torch.cat(module.split_embedding_weights()), module.split_optimizer_states()


@every_fbgemm_width
@with_decay
def test_rowwise_adagrad_is_fbgemms(dim: int, weight_decay: float, batches: Any) -> None:
    ours, state = run_ours("rowwise_adagrad", dim, batches, weight_decay=weight_decay, eps=1e-3)
    theirs, expected = run_fbgemm(EmbOptimType.EXACT_ROWWISE_ADAGRAD, dim, weight_decay, batches, eps=1e-3)
    torch.testing.assert_close(ours, theirs, **TOLERANCE["fbgemm"])
    sums = torch.cat([table_state[0] for table_state in expected])
    torch.testing.assert_close(state["sum_of_squares"], sums, **TOLERANCE["fbgemm"])


@every_fbgemm_width
@with_decay
def test_adagrad_is_fbgemms(dim: int, weight_decay: float, batches: Any) -> None:
    ours, state = run_ours("adagrad", dim, batches, weight_decay=weight_decay, eps=1e-3)
    theirs, expected = run_fbgemm(EmbOptimType.EXACT_ADAGRAD, dim, weight_decay, batches, eps=1e-3)
    torch.testing.assert_close(ours, theirs, **TOLERANCE["fbgemm"])
    sums = torch.cat([table_state[0].view(-1, dim) for table_state in expected])
    torch.testing.assert_close(state["sum_of_squares"], sums, **TOLERANCE["fbgemm"])


@every_fbgemm_width
@with_decay
def test_sgd_is_fbgemms(dim: int, weight_decay: float, batches: Any) -> None:
    ours, _ = run_ours("sgd", dim, batches, weight_decay=weight_decay)
    theirs, _ = run_fbgemm(EmbOptimType.EXACT_SGD, dim, weight_decay, batches)
    torch.testing.assert_close(ours, theirs, **TOLERANCE["fbgemm"])


@every_width
@with_decay
def test_partial_rowwise_adam_is_its_formula(dim: int, weight_decay: float, batches: Any) -> None:
    beta1, beta2, eps = 0.8, 0.99, 1e-3
    ours, state = run_ours(
        "partial_rowwise_adam", dim, batches, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay
    )
    weights = initial_weights(dim).double()
    first, second = torch.zeros_like(weights), torch.zeros(len(weights), dtype=torch.float64)
    for t, (items, gradients) in enumerate(batches(sum(NUM_IDS), dim, NUM_STEPS, 7), start=1):
        for i in set(items.tolist()):
            g = gradients[items == i].double().sum(0)
            first[i] = beta1 * first[i] + (1 - beta1) * g
            second[i] = beta2 * second[i] + (1 - beta2) * (g * g).sum() / dim
            first_hat, second_hat = first[i] / (1 - beta1**t), second[i] / (1 - beta2**t)
            step = first_hat / (second_hat**0.5 + eps) + weight_decay * weights[i]
            weights[i] = weights[i] - LEARNING_RATE * step
    torch.testing.assert_close(ours.double(), weights, **TOLERANCE["float64"])
    torch.testing.assert_close(state["first_moment"].double(), first, **TOLERANCE["float64"])
    torch.testing.assert_close(state["second_moment"].double(), second, **TOLERANCE["float64"])
