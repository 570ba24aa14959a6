"""Whether Balanced Adam's passes over memory run in C++ (kernels/cpp/balanced_adam.h) or in plain PyTorch.

PyTorch is the truth and takes every tensor. C++ reads and writes the same state in fewer passes, so a
checkpoint of one goes on with the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from recsys_basis.kernels.extension import load, missing_reason

Kernel = Literal["auto", "cpp", "torch"]
DTYPES = (torch.float32, torch.int8)
"""Of the kernels' tensors; int8 are the counters of flips."""
PLAIN = (Tensor, nn.Parameter)
"""Any subclass may keep its numbers elsewhere, as DTensor does."""


def uses_cpp(kernel: Kernel, *tensors: Tensor) -> bool:
    """Whether C++ takes ``tensors``: a parameter, and what its step reads and writes in the same shape.

    auto: where it can, else PyTorch. Raises RuntimeError if cpp is wanted and cannot.
    """
    if kernel == "torch":
        return False
    reason = _cpp_missing_reason(tensors)
    if reason is not None and kernel == "cpp":
        raise RuntimeError(f"BalancedAdam(kernel='cpp'): {reason}; or choose kernel='torch', or 'auto'")
    return reason is None


def describe_choice(parameters: Sequence[Tensor]) -> str:
    """One line on what ``dense_optimizer.kernel = auto`` takes for float32 ``parameters``, and why."""
    reasons = [_cpp_missing_reason((parameter,)) for parameter in parameters]
    missing = [reason for reason in reasons if reason is not None]
    if not missing:
        return f"dense_optimizer.kernel = auto: the C++ kernels ({load().instruction_set})"
    return (
        f"dense_optimizer.kernel = auto: plain PyTorch for {len(missing)} of {len(parameters)} parameters, "
        f"since {missing[0]}"
    )


def _cpp_missing_reason(tensors: tuple[Tensor, ...]) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into C++ kernels"
    shape = tensors[0].shape
    for tensor in tensors:
        plain = type(tensor) in PLAIN and tensor.is_cpu and tensor.is_contiguous()
        if not (plain and tensor.dtype in DTYPES and tensor.shape == shape):
            return (
                "the C++ kernels take contiguous float32 tensors on a CPU, not "
                f"{type(tensor).__name__}, {tensor.dtype}, {tensor.device}, strides {tensor.stride()}"
            )
    return missing_reason()
