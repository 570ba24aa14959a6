"""Bias correction keeps its digits where 1 - beta^t is small, and never divides by zero."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from recsys_basis.row_optimizers.bias import TableUpdates, bias_correction


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.99999])
def test_bias_correction_is_exact_to_float32(beta: float) -> None:
    updates = torch.tensor([1, 2, 3, 10, 1000, 2**31 - 1], dtype=torch.int32)
    powers = [Fraction(beta) ** t if t <= 1000 else Fraction(0) for t in updates.tolist()]
    expected = torch.tensor([float(1 - power) for power in powers])
    torch.testing.assert_close(bias_correction(beta, updates), expected, rtol=1.2e-7, atol=0)


def test_no_update_counts_as_one() -> None:
    assert bias_correction(0.75, torch.tensor([0, 1])).tolist() == [0.25, 0.25]


def test_updates_of_rows_are_those_of_their_tables() -> None:
    updates = TableUpdates([0, 10, 10, 15], torch.device("cpu"))  # the second has no rows on this rank
    updates.count.copy_(torch.tensor([4, 5, 6, 7]))
    assert updates.advance(torch.tensor([0, 9, 10, 14, 15, 99])).tolist() == [5, 5, 7, 7, 8, 8]
    assert updates.count.tolist() == [5, 6, 7, 8]
