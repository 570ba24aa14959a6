"""Bring every rank's evaluated rows to rank 0, each row exactly once, so that AUC is exact over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_rows(
    labels: torch.Tensor, logits: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Concatenate ``labels`` [n_r] and ``logits`` [n_r], both float32, over the ranks of ``group``.

    The ranks' row counts n_r may differ and may be 0. Rank 0 of the group (default: all ranks) gets
    (labels, logits), each [sum of n_r] float32 on the CPU: rank 0's rows, then rank 1's, and so on.
    The other ranks get None. Every rank must call this, in an initialised process group that has a
    CPU backend (``gloo``, or ``cpu:gloo,cuda:nccl``), also when it is the only rank.

    Raises ValueError for tensors that are not float32 [n_r] of one length.
    """
    if labels.dtype != torch.float32 or logits.dtype != torch.float32:
        raise ValueError(f"labels are {labels.dtype} and logits {logits.dtype}: both must be float32")
    if labels.ndim != 1 or labels.shape != logits.shape:
        raise ValueError(f"labels {list(labels.shape)}, logits {list(logits.shape)}: expected [n_r] for both")
    world_size = dist.get_world_size(group)

    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([len(labels)]), group=group)
    num_rows = [int(count) for count in counts]

    # The collective moves equal shapes: each rank pads to the longest, rank 0 cuts the padding off.
    mine = torch.zeros(2, max(num_rows))
    mine[:, : len(labels)] = torch.stack([labels, logits]).detach().cpu()
    if dist.get_rank(group) != 0:
        dist.gather(mine, group=group, group_dst=0)
        return None
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    dist.gather(mine, parts, group=group, group_dst=0)
    rows = torch.cat([part[:, :count] for part, count in zip(parts, num_rows, strict=True)], dim=1)
    return rows[0], rows[1]
