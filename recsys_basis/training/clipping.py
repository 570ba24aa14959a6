"""One gradient norm over the towers and the embedding rows of all ranks.

Backward would apply the rows' update before the norm is known, so with clipping on the
embedding bags hold their [U, D] gradients (``bags.py``); this scales them together with the
towers' gradients, and the fused optimizer's ``step`` applies them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.errors import NonFiniteError


def clip_gradients(
    dense: Iterable[nn.Parameter], bags: Iterable[RowOptimizedEmbeddingBags], max_norm: float
) -> float:
    """Scale all gradients by min(1, max_norm / norm) in place, and return the norm before.

    ``dense`` parameters are replicated, so their gradients count once; rows live on one rank each,
    so theirs are summed over ranks. As ``torch.nn.utils.clip_grad_norm_`` over the whole model.
    Raises NonFiniteError, with nothing changed, if the norm is not finite.
    """
    towers = [parameter.grad for parameter in dense if parameter.grad is not None]
    held = [module.held.sums for module in bags if module.held is not None]
    device = towers[0].device
    of_rows = torch.zeros((), dtype=torch.float64, device=device)
    for gradients in held:
        of_rows += gradients.double().square().sum()
    dist.all_reduce(of_rows)
    of_towers = torch.stack([gradient.double().square().sum() for gradient in towers]).sum()
    norm = float((of_rows + of_towers).sqrt())
    if not math.isfinite(norm):
        raise NonFiniteError(f"the norm of all gradients is {norm}")
    factor = min(1.0, max_norm / (norm + 1e-6))
    for gradient in (*towers, *held):
        gradient.mul_(factor)
    return norm
