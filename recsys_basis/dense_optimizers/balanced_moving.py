"""Balanced Adam's steps 3 and 5 for one parameter, in plain PyTorch and in C++."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys_basis.dense_optimizers.balanced_kernel import Kernel, uses_cpp
from recsys_basis.dense_optimizers.balanced_masking import Masks, mask_flipping, mask_small
from recsys_basis.dense_optimizers.balanced_signs import MAX_COUNTED_STEPS, SignCounters, count_flips
from recsys_basis.dense_optimizers.stepping import subtract_ratios
from recsys_basis.kernels.extension import load


class Move(NamedTuple):
    """What the steps read and write of one parameter; tensors have its shape where none is said."""

    weights: Tensor
    gradient: Tensor
    first: Tensor
    """M."""
    second: Tensor
    """V, or its largest components."""
    scale: float | Tensor
    """On V: group_scale / (1 - beta2^t); a tensor where ``bias_corrections`` gives tensors."""
    rate: float | Tensor
    """eta / (1 - beta1^t)."""
    eps: float
    measured_scale: float | Tensor = 1.0
    """On V: [C, 1, ...] over output channels, or 0-d."""
    factors: Tensor | None = None
    """On V, of rebalancing."""
    counters: SignCounters | None = None
    """The gradient's flips are entered; None: nobody counts."""
    masks: Masks | None = None
    """Needs counters."""


def move(job: Move, kernel: Kernel) -> None:
    """w -= rate M' / (sqrt(scale measured_scale V') + eps), in place."""
    extra = (*(job.counters or ()), *(() if job.factors is None else (job.factors,)))
    if uses_cpp(kernel, job.weights, job.gradient, job.first, job.second, *extra):
        _move_by_cpp(job)
    else:
        _move_by_torch(job)


def _move_by_torch(job: Move) -> None:
    first, second = job.first, job.second
    if job.counters is not None:
        count_flips(job.counters, job.gradient)
    if job.masks is not None and job.counters is not None:
        first, root = mask_small(first, second, job.masks.threshold, job.masks.entry)
        first = mask_flipping(first, job.counters.num_flips, job.masks.most_flips)
    else:
        root = second.sqrt() if job.factors is None else (second * job.factors).sqrt_()
    root.mul_((job.measured_scale * job.scale) ** 0.5).add_(job.eps)
    subtract_ratios([job.weights], [first], [root], job.rate)


def _move_by_cpp(job: Move) -> None:
    masks, measured = job.masks, job.measured_scale
    num_rows = len(job.weights) if job.weights.dim() > 1 else 1
    scales = measured.reshape(num_rows) if isinstance(measured, Tensor) and measured.dim() > 0 else None
    load().balanced_adam_move(
        job.weights.data_ptr(),
        job.gradient.data_ptr(),
        job.first.data_ptr(),
        job.second.data_ptr(),
        num_rows,
        job.weights.numel() // max(1, num_rows),
        *((each.data_ptr() for each in job.counters) if job.counters else (0, 0)),
        0 if job.factors is None else job.factors.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        job.scale * float(measured) if scales is None else job.scale,
        float(job.rate),
        job.eps,
        masks.threshold if masks else 0.0,
        masks.most_flips if masks else MAX_COUNTED_STEPS,
        masks is not None and masks.entry == "hold",
        torch.get_num_threads(),
    )
    torch.autograd.graph.increment_version(job.weights)  # as any in-place operation of torch
