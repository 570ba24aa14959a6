"""Data-parallel tables: every rank holds all of a small table, and all apply the same update."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mean_over_replicas(
    rows: torch.Tensor, gradients: torch.Tensor, num_rows: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that any rank touched, ascending, and their gradients averaged over ranks; the same on each.

    rows [U] int64, gradients [U, D] of this rank. Sends [num_rows, D + 1] numbers, so only for small tables;
    the last column marks the touched rows, which a gradient of zero would not tell.
    Averaged, as DDP does for the towers and TorchRec's backward for tables that are sharded.
    """
    width = gradients.shape[1]
    everything = gradients.new_zeros(num_rows, width + 1)
    everything[rows, :width] = gradients
    everything[rows, width] = 1
    dist.all_reduce(everything, group=group)
    touched = everything[:, width].nonzero().view(-1)
    return touched, everything[touched, :width] / dist.get_world_size(group)
