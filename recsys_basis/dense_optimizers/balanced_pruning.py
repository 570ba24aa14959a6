"""Balanced Adam's pruning: V read through its largest principal components only.

V of an n x m weight (further axes flattened) has min(n, m) singular values; the step reads the part of V
that the largest of them make up. Low-rank parts of a positive matrix may be zero or negative, so no entry
is read as less than a quarter of its own V: no step grows more than twofold.

It costs a singular value decomposition of each weight in each step, in the early phase only;
docs/dense_optimizers.md gives times. Off by default.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST_SHARE_OF_V = 0.25


def keep_components(second: Tensor, share: float) -> Tensor:
    """V [n, ...], rank >= 2, from its largest ceil(share * min(n, m)) components; the input is left alone."""
    matrix = second.flatten(1)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    count = math.ceil(share * len(values))
    kept = (left[:, :count] * values[:count]) @ right[:count]
    return torch.maximum(kept, SMALLEST_SHARE_OF_V * matrix).view_as(second)
