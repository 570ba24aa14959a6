"""Every rule, form and dtype by C++ against plain PyTorch, in whole steps: lookup, sums by row, update."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.row_variants import IDS, VARIANTS

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.features import Pooling
from recsys_basis.embeddings.spec import BagsKernel, WeightDtype
from recsys_basis.kernels import rules
from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.tables import Table, TableShard

STEPS = 20
WIDTHS = (1, 3, 16, 100, 128)
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
    "weight_updates": 0,
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


pytestmark = pytest.mark.usefixtures("kernels_on_any_threads")


def make_bags(
    kernel: BagsKernel,
    name: str,
    options: dict[str, Any],
    width: int,
    pooling: Pooling,
    weight_dtype: WeightDtype = "float32",
) -> RowOptimizedEmbeddingBags:
    sizes = (("site", 118, 4), ("device", 3, 1), ("user", 61, 2), ("page", 40, 4))
    shards = [TableShard.whole(Table(table, ids, width, partitions)) for table, ids, partitions in sizes]
    config = row_optimizer_defaults(name, **options)
    config = config.model_copy(update={key: value for key, value in VISIBLE.items() if hasattr(config, key)})
    # Features 1 and 4 share a table: a row may come from both.
    bags = RowOptimizedEmbeddingBags(
        shards, [0, 2, 1, 3, 2], config, pooling, kernel=kernel, weight_dtype=weight_dtype
    )
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


def tensors_of(bags: RowOptimizedEmbeddingBags) -> dict[str, torch.Tensor]:
    """Weights and state, as live memory."""
    return {"weights": bags.weights} | {
        name: state.tensor for name, state in bags.row_optimizer.state.items()
    }


def run(bags: RowOptimizedEmbeddingBags, steps: Iterable[int], weighted: bool) -> dict[str, torch.Tensor]:
    """All that ``steps`` leave: weights, state, the last pooled vectors."""
    pooled = torch.empty(0)
    for step in steps:
        indices, offsets, weights, gradient = batch(bags, step, weighted)
        pooled = bags(indices, offsets, weights)
        pooled.backward(gradient)
    return {"pooled": pooled.detach(), **tensors_of(bags)}


def close(key: str, found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Which numbers are."""
    return (found.double() - expected.double()).abs() <= TOLERANCE[key] * float(expected.abs().max())


NARROW_STATE = [options for _, options in VARIANTS if {"moment_dtype", "scalar_dtype"} & options.keys()]
FLOAT32 = [
    pytest.param(name, options, id=case)
    for (name, options), case in zip(VARIANTS, IDS, strict=True)
    if options not in NARROW_STATE
]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "options"), FLOAT32)
def test_cpp_is_close_to_torch_and_the_same_bits_for_any_threads(
    name: str, options: dict[str, Any], width: int
) -> None:
    pooling: Pooling = "mean" if width == 16 else "sum"
    weighted = width in (3, 100)
    expected = run(make_bags("torch", name, options, width, pooling), range(STEPS), weighted)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(make_bags("cpp", name, options, width, pooling), range(STEPS), weighted))
    for key, tensor in expected.items():
        assert torch.equal(results[0][key], results[1][key]) and torch.equal(
            results[0][key], results[2][key]
        ), key
        assert bool(close(key, results[0][key], tensor).all()), key


# Both round by the same random bits, so numbers differ where the last bit of a float32 result, 2^-23, moves
# it across a threshold: between two float16, 2^-10 apart, by a chance of 2^-13 for each such bit; between
# others by less. Other random bits would put half of them elsewhere.
MOST_DIFFERING = 2e-3


def codes(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of at most 16 bits in their order, neighbours one apart."""
    if tensor.dtype == torch.uint8:
        return tensor.int()
    bits = tensor.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


NARROW = [
    *(
        pytest.param(name, options, dtype, width, id=f"{case} weights={dtype} {width}")
        for (name, options), case in zip(VARIANTS, IDS, strict=True)
        if name != "basis" or not options
        for dtype in ("bfloat16", "float16")
        for width in WIDTHS
    ),
    *(
        pytest.param("basis", options, dtype, width, id=f"state {number} weights={dtype} {width}")
        for number, options in enumerate(NARROW_STATE)
        for dtype in ("float32", "bfloat16", "float16")
        for width in WIDTHS
    ),
]


@pytest.mark.parametrize(("name", "options", "weight_dtype", "width"), NARROW)
def test_from_the_same_numbers_cpp_rounds_as_torch_does(
    name: str, options: dict[str, Any], weight_dtype: WeightDtype, width: int
) -> None:
    """Step by step, each from the bits that plain PyTorch has reached."""
    make = functools.partial(
        make_bags, name=name, options=options, width=width, pooling="sum", weight_dtype=weight_dtype
    )
    reference, by_threads = make("torch"), {threads: make("cpp") for threads in (1, 2, 3)}
    differing: dict[str, float] = defaultdict(float)
    for step in range(STEPS):
        before = {key: tensor.clone() for key, tensor in tensors_of(reference).items()}
        expected = run(reference, [step], weighted=width == 3)
        results = []
        for threads, bags in by_threads.items():
            torch.set_num_threads(threads)
            for key, tensor in tensors_of(bags).items():
                tensor.copy_(before[key])
            results.append(run(bags, [step], weighted=width == 3))
        for key, tensor in expected.items():
            found = results[0][key]
            assert torch.equal(found, results[1][key]) and torch.equal(found, results[2][key]), key
            assert found.dtype == tensor.dtype
            same = close(key, found, tensor)  # what a step leaves of a weight may be less than an error
            if tensor.element_size() <= 2:
                differing[key] += float((found != tensor).double().mean()) / STEPS
                same |= (codes(found) - codes(tensor)).abs() <= 1
            assert bool(same.all()), key
    assert all(share <= MOST_DIFFERING for share in differing.values()), dict(differing)
    if weight_dtype != "float32":
        assert reference.row_optimizer.state["weight_updates"].tensor.tolist() == [STEPS] * 4


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, every second one of its memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


@pytest.mark.parametrize("spoil", [torch.Tensor.double, spaced])
@pytest.mark.parametrize(
    ("name", "options"), [case for case in VARIANTS if not case[1] or case[0] != "basis"]
)
def test_what_would_be_written_to_a_copy_is_refused(
    name: str, options: dict[str, Any], spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Of another type or layout nanobind would make a copy, and the row's state would stay as it was."""
    weights, rows, gradient = torch.ones(6, 4), torch.tensor([1, 4]), torch.ones(2, 4)
    tables = [TableShard.whole(Table("site", 6, 4, 2))]

    def refuses(attribute: str | None, weights: torch.Tensor) -> None:
        optimizer = create_row_optimizer(row_optimizer_defaults(name, **options), tables)
        if attribute is not None:
            setattr(optimizer, attribute, spoil(getattr(optimizer, attribute)))
        with pytest.raises(TypeError, match="incompatible function arguments"):
            rules.update(optimizer, weights, rows, gradient, 0.1)

    refuses(None, spoil(weights))
    optimizer = create_row_optimizer(row_optimizer_defaults(name, **options), tables)
    _, arguments = rules.RULES[type(optimizer)]
    handed = {getattr(value, "data_ptr", int)() for value in arguments(optimizer, rows).values()}
    states = {state.tensor.data_ptr() for state in optimizer.state.values() if state.per != "table"} & handed
    written = [key for key, value in vars(optimizer).items() if getattr(value, "data_ptr", int)() in states]
    assert len(written) == len(states)
    for attribute in written:
        refuses(attribute, weights)
