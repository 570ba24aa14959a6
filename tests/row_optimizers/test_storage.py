"""State in fewer bits: unbiased rounding to neighbours, random bits that repeat, and bytes as promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels import require_kernels
from support.rows import update_rows

from recsys_basis.embeddings.weights import Weights
from recsys_basis.kernels import stored as stored_in_cpp
from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.base import RowOptimizer
from recsys_basis.row_optimizers.storage import LOG8_VALUES, Stored, round_randomly
from recsys_basis.tables import Table, TableShard

NUM_DRAWS = 1 << 16
# Odd times 0, 1, 2, ...: every value of the low 16 bits once, and the whole 24 evenly spread.
EVEN_DRAWS = (torch.arange(NUM_DRAWS) * 10_368_889) & 0xFFFFFF


def stored(tensor: torch.Tensor, seed: int = 1) -> Stored:
    return Stored(tensor, *torch.tensor([[0], [seed], [0]]))


def test_an_average_at_beta_999_moves_in_bfloat16_by_stochastic_rounding_alone() -> None:
    keys = torch.arange(64)
    chance, nearest = stored(torch.ones(64, 64, dtype=torch.bfloat16)), torch.ones(64, 64).bfloat16()
    for step in range(100):
        chance.write(keys, chance.read(keys).lerp(torch.tensor(2.0), 1e-3), torch.full((64,), step))
        nearest = nearest.float().lerp(torch.tensor(2.0), 1e-3).bfloat16()
    assert bool((nearest == 1).all())
    # A step's rounding has a variance below p (1 - p) / 128^2 with p = 0.128: of the mean of 4096 it is 4e-4.
    assert float(chance.read(keys).mean()) == pytest.approx(2 - 0.999**100, abs=5 * 4e-4)


@pytest.mark.parametrize(
    ("dtype", "value", "lower", "upper"),
    [
        (torch.bfloat16, 1 + 0.3 / 128, 1, 1 + 1 / 128),
        (torch.bfloat16, -(2 + 0.9 / 64), -(2 + 1 / 64), -2),
        (torch.float16, 1 + 0.3 / 1024, 1, 1 + 1 / 1024),
        (torch.float16, 0.25 * 2.0**-24, 0, 2.0**-24),
        (torch.float16, -6.7 * 2.0**-24, -7 * 2.0**-24, -6 * 2.0**-24),
        (torch.uint8, 1.1, 1.0, 2 ** (1 / 3)),
        (torch.uint8, 2.0**-50.1, 2 ** (-50 - 1 / 3), 2.0**-50),
        (torch.uint8, 2.0**-65, 0, 2 ** (-64 + 1 / 3)),
    ],
)
def test_rounding_takes_one_of_the_two_neighbours_and_is_exact_on_average(
    dtype: torch.dtype, value: float, lower: float, upper: float
) -> None:
    rounded = round_randomly(torch.full((NUM_DRAWS,), value), EVEN_DRAWS, dtype)
    numbers = LOG8_VALUES[rounded.long()] if dtype == torch.uint8 else rounded.float()
    found = numbers.double().numpy()
    np.testing.assert_allclose(np.unique(found), [lower, upper], rtol=1e-6)
    np.testing.assert_allclose(found.mean(), value, rtol=0, atol=1e-3 * (upper - lower))


@pytest.mark.parametrize("random", [0, 0xFFFFFF])
def test_numbers_that_fit_stay_and_those_beyond_become_the_largest(random: int) -> None:
    def round_all(values: Any, dtype: torch.dtype) -> list[float]:
        tensor = torch.as_tensor(values, dtype=torch.float32)
        result: list[float] = round_randomly(tensor, torch.full(tensor.shape, random), dtype).tolist()
        return result

    fitting = [0.0, 1.0, -1.5, 0.25, 2.0**-14, -(2.0**-24)]
    assert round_all(fitting, torch.bfloat16) == round_all(fitting, torch.float16) == fitting
    assert round_all([7e4, -1e9], torch.float16) == [65504, -65504]
    assert round_all(LOG8_VALUES, torch.uint8) == list(range(256))
    assert round_all([1e9], torch.uint8) == [255]
    assert LOG8_VALUES[192] == 1 and LOG8_VALUES[195] == 2


def test_random_bits_depend_on_seed_key_element_and_update_and_on_nothing_else() -> None:
    def halves(seed: int, updates: int, order: torch.Tensor) -> torch.Tensor:
        """Whether each number halfway between two of bfloat16's went up, [64, 64]."""
        result = stored(torch.zeros(64, 64, dtype=torch.bfloat16), seed)
        result.write(order, torch.full((64, 64), 1 + 1 / 256), torch.full((64,), updates))
        return result.tensor > 1

    first = halves(1, 1, torch.arange(64))
    assert torch.equal(first, halves(1, 1, torch.arange(63, -1, -1)))
    agreement = [
        first == halves(2, 1, torch.arange(64)),
        first == halves(1, 2, torch.arange(64)),
        first == first.roll(1, 0),
        first == first.roll(1, 1),
        first,
    ]
    for share in agreement:  # of 4096 fair coins: standard deviation 0.008
        assert float(share.float().mean()) == pytest.approx(0.5, abs=0.04)


def make(rows: int, width: int, **options: Any) -> RowOptimizer:
    config = row_optimizer_defaults("basis", **options)
    return create_row_optimizer(config, [TableShard.whole(Table("site", rows, width, 1))])


@pytest.mark.parametrize(("scalar_dtype", "bytes_a_row"), [("bfloat16", 2), ("log8", 1)])
def test_bytes_of_live_state_are_those_promised(scalar_dtype: str, bytes_a_row: int) -> None:
    """A row's scalar, and a bucket's V and count t."""
    optimizer = make(1000, 128, scalar_dtype=scalar_dtype, rows_per_bucket=100.0)
    assert optimizer.state_bytes() == bytes_a_row * 1000 + 10 * (4 * 128 + 4) + 8


@pytest.mark.parametrize("scalar", ["energy", "hypergradient"])
def test_a_first_step_is_float32s_and_what_is_kept_lies_next_to_it(scalar: str) -> None:
    rows, gradients = torch.arange(0, 200, 3), torch.randn(67, 16, generator=torch.Generator().manual_seed(1))
    results = []
    for dtype in ("float32", "bfloat16"):
        optimizer = make(200, 16, scalar=scalar, moment_dtype=dtype, scalar_dtype=dtype)
        weights = torch.zeros(200, 16)
        update_rows(optimizer, weights, rows, gradients, 0.1)
        results.append((weights, {name: state.tensor.float() for name, state in optimizer.state.items()}))
    (weights, full), (weights_again, short) = results
    assert torch.equal(weights, weights_again)
    assert full.keys() == short.keys()
    for name, tensor in full.items():
        torch.testing.assert_close(short[name], tensor, rtol=1 / 128, atol=0)
    assert not torch.equal(short["second_moment"], full["second_moment"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_cpp_reads_and_writes_the_same_bits(dtype: torch.dtype) -> None:
    require_kernels()
    generator = torch.Generator().manual_seed(3)
    places = torch.tensor([[0, 30, 60], [5, -6, 7], [0, 3, 0]])
    ours, theirs = (Stored(torch.zeros(100, 37, dtype=dtype), *places) for _ in range(2))
    keys, updates = torch.randperm(100, generator=generator)[:60], torch.arange(60)
    values = torch.randn(60, 37, generator=generator)
    values *= 10 ** torch.empty(60, 37).uniform_(-25, 6, generator=generator)
    values[0, :5] = torch.tensor([0.0, -0.0, -(2.0**-14), 2.0**-24, -7e4])
    values = values.abs() if dtype == torch.uint8 else values
    ours.write(keys, values, updates)
    stored_in_cpp.write(theirs, keys, values, updates)
    assert torch.equal(ours.tensor.view(torch.uint8), theirs.tensor.view(torch.uint8))
    assert torch.equal(stored_in_cpp.read(theirs, keys), ours.read(keys))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
def test_cpp_reads_every_number(dtype: torch.dtype) -> None:
    require_kernels()
    codes = torch.arange(1 << 8 * dtype.itemsize)
    tensor = codes.to(torch.uint8 if dtype == torch.uint8 else torch.uint16).view(dtype)[:, None]
    every = Stored(tensor, *torch.tensor([[0], [0], [0]]))
    torch.testing.assert_close(
        stored_in_cpp.read(every, codes), every.read(codes), rtol=0, atol=0, equal_nan=True
    )


def test_cpp_refuses_what_it_would_write_beside_the_tensor() -> None:
    require_kernels()
    target = Stored(torch.zeros(4, 2).bfloat16(), *torch.tensor([[0], [0], [0]]))
    one = torch.ones(1, dtype=torch.int64)
    for keys, values in ((4 * one, torch.ones(1, 2)), (-one, torch.ones(1, 2)), (one, torch.ones(1, 3))):
        with pytest.raises(ValueError, match=r"keys: out of range|values: must be"):
            stored_in_cpp.write(target, keys, values, one)
    assert not target.tensor.any()


def test_blocks_of_columns_and_rows_round_as_the_whole_does() -> None:
    table = Table("site", 64, 8, 4)
    block = replace(table, embedding_dim=4)

    def rounded(shard: TableShard, values: torch.Tensor) -> torch.Tensor:
        weights = Weights(torch.zeros(values.shape, dtype=torch.bfloat16), [shard])
        weights.write(torch.arange(len(values)), values, torch.full((len(values),), 3))
        return weights.tensor

    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    whole = rounded(TableShard.whole(table), values)
    assert not torch.equal(whole, values.bfloat16())
    for shard in (TableShard(block, 0, 64, 4), TableShard(block, 32, 32, 0), TableShard(block, 32, 32, 4)):
        rows, columns = slice(shard.row_offset, shard.row_offset + shard.num_rows), shard.column_offset
        part = (rows, slice(columns, columns + 4))
        assert torch.equal(rounded(shard, values[part]), whole[part])
