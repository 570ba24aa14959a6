"""Under DistributedDataParallel ranks hold the same bits, nearly those of one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recsys_basis.dense_optimizers import create_dense_optimizer, dense_optimizer_defaults

CASES: list[tuple[str, dict[str, Any]]] = [
    ("sm3", {}),
    ("balanced_adam", {"groups": "cluster", "early_steps": 12}),
]
STEPS, BATCH = 20, 16


def train_part(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    """Weights of each case after training on this rank's share of every batch."""
    results = []
    for name, options in CASES:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = create_dense_optimizer(dense_optimizer_defaults(name, **options), model)
        if world_size > 1:
            model = DistributedDataParallel(model)
        for step in range(STEPS):
            batch = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(step))[rank::world_size]
            optimizer.zero_grad()
            (model(batch[:, :6]) - batch[:, 6:]).square().mean().backward()
            optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    return results


def train_on_rank() -> list[list[torch.Tensor]]:
    dist.init_process_group("gloo")
    results = train_part(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def by_rank() -> list[list[list[torch.Tensor]]]:
    return run_ranks(2, train_on_rank)


def test_ranks_hold_the_same_bits(by_rank: list[list[list[torch.Tensor]]]) -> None:
    for first, second in zip(*by_rank, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_two_ranks_train_as_one(by_rank: list[list[list[torch.Tensor]]]) -> None:
    for split, whole in zip(by_rank[0], train_part(0, 1), strict=True):
        for a, b in zip(split, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
