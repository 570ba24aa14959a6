"""Data-parallel tables: every rank holds all of a small table, and all apply the same update."""

from __future__ import annotations

import torch
import torch.distributed as dist

from recsys_basis.embeddings.features import RowGradients


def mean_over_replicas(gradients: RowGradients, num_rows: int, group: dist.ProcessGroup) -> RowGradients:
    """The rows that any rank touched, their gradients averaged and their counts summed; the same on each.

    Sends [num_rows, D + 2] numbers, so only for small tables: beside a row's gradient a mark that it was
    touched, which a gradient of zero would not tell, and its count, exact up to 2^24.
    Averaged, as DDP does for the towers and TorchRec's backward for tables that are sharded.
    """
    rows, sums, counts = gradients.rows, gradients.sums, gradients.counts
    width = sums.shape[1]
    everything = sums.new_zeros(num_rows, width + 2)
    everything[rows, :width] = sums
    everything[rows, width] = 1
    if counts is not None:
        everything[rows, width + 1] = counts.float()
    dist.all_reduce(everything, group=group)
    touched = everything[:, width].nonzero().view(-1)
    found = everything[touched]
    mean = found[:, :width] / dist.get_world_size(group)
    return RowGradients(
        touched,
        mean,
        bool(torch.isfinite(mean.square().sum())),
        None if counts is None else found[:, width + 1].long(),
    )
