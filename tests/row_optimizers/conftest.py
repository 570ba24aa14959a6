"""Batches for the tests of row optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

Batches = Callable[[int, int, int, int], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def _draw(num_rows: int, dim: int, num_steps: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    # A few rows come in every batch, several times; most come now and then.
    popularity = torch.arange(1, num_rows + 1).double().reciprocal()
    popularity = popularity[torch.randperm(num_rows, generator=generator)]
    for _ in range(num_steps):
        rows = torch.multinomial(popularity, num_rows // 2, replacement=True, generator=generator)
        scale = 10 ** torch.empty(len(rows), 1).uniform_(-1, 1, generator=generator)
        yield rows, scale * torch.randn(len(rows), dim, generator=generator)


@pytest.fixture
def batches() -> Batches:
    """(num_rows, D, steps, seed) -> for each step rows [L] int64 with repeats, and gradients [L, D]."""
    return _draw
