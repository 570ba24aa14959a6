"""Balanced Adam's scales of the second moment, all measured on the gradient of one parameter or one kind.

A scale c multiplies V where the step reads it, never where it is stored: 50 steps apply c, not c^50. The
step is eta M^ / (sqrt(c V^) + eps): c > 1 makes it smaller, by 1 / sqrt(c), and c < 1 larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def channel_scale(gradient: Tensor) -> Tensor:
    """Scale of each output channel: its gradient's standard deviation over the mean of all channels'.

    gradient [C, ...] of rank >= 2, dimension 0 the output channels; returns [C, 1, ...]. A channel of
    noisier gradient steps less; one without deviation has scale 0, which the caller bounds. Where no
    channel deviates (all zero, or fan-in 1) the scale is 1.
    """
    deviations = _centred_norm(gradient, tuple(range(1, gradient.dim())))
    return _over_mean(deviations, deviations.mean())


def cluster_scales(gradients: Sequence[Tensor], kinds: Sequence[str]) -> list[Tensor]:
    """0-d scale of each parameter: the mean deviation of its cluster over that of its kind.

    The parameters of a kind are split in two by the logarithm of their gradient's standard deviation
    (``split_in_two``), into a quiet and a noisy half; the noisy half steps less.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for index, kind in enumerate(kinds):
        members[kind].append(index)
    scales: dict[int, Tensor] = {}
    for indices in members.values():
        deviations = torch.stack([_deviation(gradients[index]) for index in indices])
        noisy = split_in_two(deviations.clamp(min=torch.finfo(torch.float32).tiny).log())
        mean_noisy = (deviations * noisy).sum() / noisy.sum()
        mean_quiet = (deviations * ~noisy).sum() / (~noisy).sum().clamp(min=1)
        of_kind = _over_mean(torch.where(noisy, mean_noisy, mean_quiet), deviations.mean())
        scales.update(zip(indices, of_kind.unbind(), strict=True))
    return [scales[index] for index in range(len(gradients))]


def split_in_two(values: Tensor) -> Tensor:
    """bool [n]: True for the upper cluster of the best 2-means split of ``values`` [n]; all True for n = 1.

    On a line both clusters are runs of the sorted values, so the best of the n - 1 cuts is the exact
    optimum of k-means, with no random start: sum of squares around the means is least where S_low^2 / n_low
    + S_high^2 / n_high is largest.
    """
    if values.numel() == 1:
        return torch.ones_like(values, dtype=torch.bool)
    ordered, order = (values.double() - values.double().mean()).sort(stable=True)
    num_low = torch.arange(1, len(ordered), device=values.device)
    sum_low = ordered.cumsum(0)[:-1]
    sum_high = ordered.sum() - sum_low
    cut = (sum_low.square() / num_low + sum_high.square() / (len(ordered) - num_low)).argmax()
    upper = torch.empty_like(values, dtype=torch.bool)
    upper[order] = torch.arange(len(ordered), device=values.device) > cut
    return upper


def _deviation(values: Tensor) -> Tensor:
    """Standard deviation of all entries, 0-d."""
    return _centred_norm(values, tuple(range(values.dim()))).squeeze() / math.sqrt(values.numel())


def _centred_norm(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Standard deviation over ``axes``, which stay as 1, times the root of their number of entries.

    torch's ``std`` takes 20 times as long on a CPU.
    """
    centred = values - values.mean(axes, keepdim=True)
    return torch.linalg.vector_norm(centred, dim=axes, keepdim=True)


def _over_mean(deviations: Tensor, mean: Tensor) -> Tensor:
    return (deviations / mean).nan_to_num(nan=1.0)  # 0 / 0 where nothing deviates
