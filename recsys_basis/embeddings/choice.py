"""Which kernel runs, from ``embedding.kernel``, the rule and the device. Only ``auto`` may fall back."""

from __future__ import annotations

from typing import Literal

from recsys_basis.embeddings.spec import BagsKernel
from recsys_basis.kernels.extension import load, missing_reason
from recsys_basis.kernels.rules import missing_rule
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.schema import ConfigError


def choose_bags_kernel(
    wanted: Literal["auto", "cpp", "torch"], config: RowOptimizerConfig, device_type: str
) -> BagsKernel:
    """The kernel of our embedding bags for the rule of ``config`` on ``device_type``.

    auto: cpp where it can run, else torch. Raises ConfigError if cpp is wanted and cannot run.
    """
    if wanted == "torch":
        return "torch"
    reason = cpp_missing_reason(config, device_type)
    if reason is None:
        return "cpp"
    if wanted == "auto":
        return "torch"
    raise ConfigError(f"embedding.kernel = cpp: {reason}; or choose embedding.kernel=torch")


def cpp_missing_reason(config: RowOptimizerConfig, device_type: str) -> str | None:
    """Why the C++ kernels cannot run the rule of ``config`` on ``device_type``; None if they can."""
    if device_type != "cpu":
        return f"the C++ kernels run on a CPU, not on {device_type}"
    return missing_rule(config) or missing_reason()


def describe_choice(config: RowOptimizerConfig, device_type: str) -> str:
    """One line on what ``embedding.kernel = auto`` takes, and why."""
    reason = cpp_missing_reason(config, device_type)
    if reason is None:
        return f"embedding.kernel = auto: the C++ kernels ({load().instruction_set})"
    return f"embedding.kernel = auto: plain PyTorch, since {reason}"
