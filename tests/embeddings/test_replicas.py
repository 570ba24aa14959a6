"""Gradients of replicated rows; with several ranks they are checked by training, in test_sharder.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from recsys_basis.embeddings.features import RowGradients
from recsys_basis.embeddings.replicas import mean_over_replicas
from recsys_basis.training.runtime import RuntimeConfig, start_runtime


def test_a_row_whose_gradient_is_zero_was_touched_all_the_same() -> None:
    sums = torch.tensor([[0.0, 0.0], [3.0, -5.0]])
    gradients = RowGradients(torch.tensor([1, 4]), sums, True, torch.tensor([7, 2]))
    with start_runtime(RuntimeConfig(device="cpu", threads_per_rank=1, collective_timeout_s=60)):
        found = mean_over_replicas(gradients, 6, dist.group.WORLD)
    assert torch.equal(found.rows, gradients.rows) and torch.equal(found.sums, sums) and found.finite
    assert found.counts is not None and found.counts.tolist() == [7, 2]
