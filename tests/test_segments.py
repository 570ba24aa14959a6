"""Sums by key against pandas, on whole numbers so that equality is exact."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_basis.segments import Segments


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(4)).float()


def expected_sums(keys: torch.Tensor, values: torch.Tensor) -> pd.DataFrame:
    return pd.DataFrame(values.numpy()).groupby(keys.numpy()).sum()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(keys=st.lists(st.integers(-5, 30), min_size=1, max_size=80), dim=st.sampled_from([1, 3, 16, 100]))
def test_sums_by_key_are_pandas_groupby(keys: list[int], dim: int) -> None:
    key_tensor, values = torch.tensor(keys), whole_numbers(len(keys), dim)
    segments = Segments.of(key_tensor)
    expected = expected_sums(key_tensor, values)
    assert segments.keys.tolist() == expected.index.tolist()
    assert segments.counts.tolist() == pd.Series(keys).value_counts().sort_index().tolist()
    assert torch.equal(segments.sum(values), torch.tensor(expected.to_numpy()))
    assert torch.equal(segments.keys[segments.position_of_items()], key_tensor)


@pytest.mark.parametrize("dim", [1, 3, 16, 100])
def test_index_and_weight(dim: int) -> None:
    """Item l adds weight[l] * source[index[l]]."""
    generator = torch.Generator().manual_seed(8)
    keys = torch.randint(0, 20, (300,), generator=generator)
    index = torch.randint(0, 40, (300,), generator=generator)
    source, weight = whole_numbers(40, dim), whole_numbers(300)
    expected = expected_sums(keys, source[index] * weight[:, None])
    assert torch.equal(Segments.of(keys).sum(source, index, weight), torch.tensor(expected.to_numpy()))


def test_order_keeps_first_come_first_within_a_key() -> None:
    segments = Segments.of(torch.tensor([7, 2, 7, 2, 9, 7]))
    assert segments.order.tolist() == [1, 3, 0, 2, 5, 4]
    assert segments.keys.tolist() == [2, 7, 9] and segments.counts.tolist() == [2, 3, 1]


def test_no_items() -> None:
    segments = Segments.of(torch.empty(0, dtype=torch.int64))
    assert segments.keys.numel() == 0 and segments.position_of_items().numel() == 0
    assert segments.sum(torch.ones(0, 3)).shape == (0, 3)
    index = torch.empty(0, dtype=torch.int64)
    assert segments.sum(torch.ones(5, 3), index, torch.empty(0)).shape == (0, 3)
