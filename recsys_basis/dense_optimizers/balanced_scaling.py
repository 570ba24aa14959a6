"""Balanced Adam's scales of the second moment, all measured on the gradient of one parameter or one kind.

A scale c multiplies V where the step reads it, never where it is stored: 50 steps apply c, not c^50. The
step is eta M^ / (sqrt(c V^) + eps): c > 1 makes it smaller, by 1 / sqrt(c), and c < 1 larger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_basis.dense_optimizers.balanced_kernel import Kernel, uses_cpp
from recsys_basis.kernels.extension import load


def clipped_scale(gradient: Tensor, cluster_scale: Tensor | None, limit: float, kernel: Kernel) -> Tensor:
    """Channel scale [C, 1, ...] times cluster scale, within [1 / limit, limit]."""
    if uses_cpp(kernel, gradient):
        scale = gradient.new_empty(len(gradient), *[1] * (gradient.dim() - 1))
        load().balanced_adam_scales(
            gradient.data_ptr(),
            1.0 if cluster_scale is None else cluster_scale.item(),
            limit,
            scale.data_ptr(),
            len(gradient),
            gradient[0].numel(),
            torch.get_num_threads(),
        )
        return scale
    scale = channel_scale(gradient)
    return (scale if cluster_scale is None else scale * cluster_scale).clamp(1.0 / limit, limit)


def channel_scale(gradient: Tensor) -> Tensor:
    """Scale of each output channel: its gradient's standard deviation over the mean of all channels'.

    gradient [C, ...] of rank >= 2, dimension 0 the output channels; returns [C, 1, ...]. A channel of
    noisier gradient steps less; one without deviation has scale 0, which the caller bounds. Where no
    channel deviates (all zero, or fan-in 1) the scale is 1.
    """
    norms = _centred_norm(gradient, tuple(range(1, gradient.dim())))
    return _over_mean(norms, norms.mean())


def deviations(gradients: Sequence[Tensor], kernels: Sequence[Kernel]) -> Tensor:
    """[n]: the standard deviation of all entries of each gradient; C++ takes all or none."""
    if all(uses_cpp(kernel, each) for each, kernel in zip(gradients, kernels, strict=True)):
        deviation = load().deviation
        return gradients[0].new_tensor([deviation(each.data_ptr(), each.numel()) for each in gradients])
    norms = [_centred_norm(each, tuple(range(each.dim()))).squeeze() for each in gradients]
    return torch.stack([norm / math.sqrt(each.numel()) for norm, each in zip(norms, gradients, strict=True)])


def cluster_scales(deviations: Tensor, kinds: Sequence[str]) -> Tensor:
    """[n], scale of each parameter: the mean deviation of its cluster over that of its kind.

    The parameters of a kind are split in two by the logarithm of their gradients' deviations [n]
    (``split_in_two``), into a quiet and a noisy half; the noisy half steps less. ``kinds`` are in order.
    """
    sizes = [len(list(members)) for _, members in itertools.groupby(kinds)]
    akin = torch.block_diag(*[deviations.new_ones(size, size) for size in sizes])  # [n, n]: 1 within a kind
    noisy = split_in_two(deviations.clamp(min=torch.finfo(torch.float32).tiny).log(), akin)
    joined = akin * (noisy == noisy.unsqueeze(1))  # [n, n]: 1 within a cluster
    return _over_mean(joined @ deviations / joined.sum(1), akin @ deviations / akin.sum(1))


def split_in_two(values: Tensor, akin: Tensor) -> Tensor:
    """bool [n]: True for the upper cluster of the best 2-means split of each kind's share of ``values`` [n].

    akin [n, n] is 1 where two are of one kind, else 0; all kinds are split at once. Equal values stay
    together, on either side.

    On a line the clusters lie below and above a cut, so trying each value as the last below gives the exact
    optimum of k-means, with no random start: sum of squares around the means is least where S^2 / n of
    below plus that of above is largest. Of centred values S_below = -S_above.
    """
    count = akin.sum(1)
    centred = values - akin @ values / count
    above = akin * (centred > centred.unsqueeze(1))  # [n, n]: row i is the split after value i
    num_above = above.sum(1)
    gain = (above @ centred).square() / (num_above * (count - num_above)).clamp(min=1.0)
    return centred > centred.take((akin * gain).argmax(1))


def _centred_norm(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Standard deviation over ``axes``, which stay as 1, times the root of their number of entries.

    torch's ``std`` takes 20 times as long on a CPU.
    """
    centred = values - values.mean(axes, keepdim=True)
    return torch.linalg.vector_norm(centred, dim=axes, keepdim=True)


def _over_mean(deviations: Tensor, mean: Tensor) -> Tensor:
    return (deviations / mean).nan_to_num(nan=1.0)  # 0 / 0 where nothing deviates
