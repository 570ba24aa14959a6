"""Gradients of replicated rows; with several ranks they are checked by training, in test_sharder.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from recsys_basis.embeddings.replicas import mean_over_replicas
from recsys_basis.training.runtime import RuntimeConfig, start_runtime


def test_a_row_whose_gradient_is_zero_was_touched_all_the_same() -> None:
    rows, gradients = torch.tensor([1, 4]), torch.tensor([[0.0, 0.0], [3.0, -5.0]])
    with start_runtime(RuntimeConfig(device="cpu", threads_per_rank=1, collective_timeout_s=60)):
        found = mean_over_replicas(rows, gradients, 6, dist.group.WORLD)
    assert torch.equal(found[0], rows) and torch.equal(found[1], gradients)
