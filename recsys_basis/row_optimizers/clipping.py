"""Clipping of each row's gradient before any rule sees it.

The summed gradient g_i of a touched row i that came n_i times in the batch is shortened to at most limit_i:
    limit_i = min(max_norm, n_i max(cowclip_ratio |w_i|, cowclip_min_norm))         null: no such limit
    g_i <- g_i min(1, limit_i / |g_i|)
The second limit is CowClip (Zheng et al., "CowClip: Reducing CTR Prediction Model Training Time from 12
hours to 10 minutes on 1 GPU", AAAI 2023, algorithm 1; r and zeta there), with w_i from before the update.
n_i counts the ids of all ranks, as the gradient does. ``max_gradient_norm``, the one norm over towers and
rows (``recsys_basis.training.clipping``), comes first where it is on.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field

from recsys_basis.schema import Section

Positive = Annotated[float, Field(gt=0.0)]


class RowClip(Section):
    """Section ``row_optimizer.clip``; presets in configs/row_optimizer/clip."""

    max_norm: Positive | None
    """Largest Euclidean norm of a row's gradient; null: off."""
    cowclip_ratio: Positive | None
    """r of CowClip; null: off."""
    cowclip_min_norm: Positive
    """zeta of CowClip: what stands for ratio * |w| where that is smaller."""

    @property
    def is_on(self) -> bool:
        return self.max_norm is not None or self.needs_counts

    @property
    def needs_counts(self) -> bool:
        """Whether it asks how often each row came in the batch."""
        return self.cowclip_ratio is not None


def clip_rows(
    clip: RowClip, weights: torch.Tensor, gradients: torch.Tensor, counts: torch.Tensor | None
) -> None:
    """Shorten ``gradients`` [U, D] in place.

    weights [U, D], those of the same rows; counts [U] int64, there if ``clip.needs_counts``.
    """
    norm = gradients.norm(dim=1)
    limit = torch.full_like(norm, math.inf if clip.max_norm is None else clip.max_norm)
    if clip.cowclip_ratio is not None:
        assert counts is not None, "whoever sums the gradients reads needs_counts"
        of_weights = clip.cowclip_ratio * weights.norm(dim=1)
        limit = limit.minimum(counts * of_weights.clamp(min=clip.cowclip_min_norm))
    gradients *= (limit / norm).clamp_(max=1)[:, None]
