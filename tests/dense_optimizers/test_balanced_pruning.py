"""V from its largest components."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recsys_basis.dense_optimizers.balanced_pruning import keep_components


@pytest.mark.parametrize(("share", "count"), [(0.25, 1), (0.26, 2), (0.5, 2), (1.0, 4)])
def test_keeps_the_largest_share_and_a_quarter_of_v(share: float, count: int) -> None:
    second = np.random.default_rng(0).random((4, 3, 2)) ** 4
    matrix = second.reshape(4, 6)
    values, vectors = np.linalg.eigh(matrix @ matrix.T)  # largest last
    largest = vectors[:, len(values) - count :]
    expected = np.maximum(largest @ largest.T @ matrix, 0.25 * matrix).reshape(second.shape)
    torch.testing.assert_close(keep_components(torch.as_tensor(second), share), torch.as_tensor(expected))


def test_all_components_and_rank_one_are_v() -> None:
    second = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(keep_components(second, 1.0), second)
    outer = torch.outer(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 4.0]))
    torch.testing.assert_close(keep_components(outer, 0.5), outer)
