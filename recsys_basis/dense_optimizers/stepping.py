"""What every optimizer step here has in common: what it takes, float32 inside, how it writes.

``float32_parameters`` is the one idea worth a word. torch's optimizers keep state in the parameter's dtype,
and an average with beta2 = 0.999 hardly moves in bfloat16: its steps of 0.1 % are below the 0.4 % between
neighbouring numbers. So for the length of a step a float16 or bfloat16 parameter and its gradient are
float32: so is the state born in the step, and the arithmetic, and only the new weight is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HALF_PRECISION = (torch.float16, torch.bfloat16)

ParameterGroup = dict[str, Any]
TensorList = tuple[Tensor, ...] | list[Tensor]
Closure = Callable[[], float] | None


def evaluate_closure(closure: Closure) -> float | None:
    """The loss of ``closure``, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_sparse_gradients(optimizer: Optimizer) -> None:
    """Raises RuntimeError, naming the parameter, if a gradient is sparse or complex."""
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            gradient = parameter.grad
            if gradient is None or not (gradient.layout != torch.strided or gradient.is_complex()):
                continue
            names = group.get("param_names")
            name = names[index] if names else f"{index} of group {group_index}"
            kind = "complex" if gradient.layout == torch.strided else "sparse"
            raise RuntimeError(
                f"{type(optimizer).__name__} takes dense real gradients, but that of parameter {name} is "
                f"{kind}; for embeddings use sparse=False, a row optimizer, or torch.optim.SparseAdam"
            )


@contextmanager
def float32_parameters(groups: Iterable[ParameterGroup]) -> Iterator[None]:
    """Inside, half-precision parameters of ``groups`` that have a gradient are float32, as is the gradient.

    On leaving, the float32 values are rounded into the original memory, and the original gradients return.
    """
    narrow = [
        (parameter, parameter.data, parameter.grad)
        for group in groups
        for parameter in group["params"]
        if parameter.dtype in HALF_PRECISION and parameter.grad is not None
    ]
    for parameter, data, gradient in narrow:
        parameter.grad = None  # a gradient must have its parameter's dtype at every moment
        parameter.data = data.float()
        parameter.grad = gradient.float()
    try:
        yield
    finally:
        for parameter, data, gradient in narrow:
            data.copy_(parameter.data)
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient


def decay_weights(parameters: list[Tensor], learning_rate: float | Tensor, weight_decay: float) -> None:
    """Decoupled weight decay in place: w *= 1 - eta lambda."""
    if weight_decay == 0.0:
        return
    if isinstance(learning_rate, Tensor):
        torch._foreach_mul_(parameters, 1.0 - learning_rate * weight_decay)
    else:
        torch._foreach_mul_(parameters, 1.0 - learning_rate * weight_decay)


def subtract(parameters: list[Tensor], updates: TensorList, learning_rate: float | Tensor) -> None:
    """w -= eta u in place. A 0-d tensor eta stays a tensor: a captured graph reads its current value."""
    if isinstance(learning_rate, Tensor):
        torch._foreach_sub_(parameters, torch._foreach_mul(updates, learning_rate))
    else:
        torch._foreach_add_(parameters, updates, alpha=-learning_rate)


def subtract_ratios(
    parameters: list[Tensor], numerators: TensorList, denominators: TensorList, learning_rate: float | Tensor
) -> None:
    """w -= eta n / d in place; eta as in ``subtract``."""
    if isinstance(learning_rate, Tensor):
        subtract(parameters, torch._foreach_div(numerators, denominators), learning_rate)
    else:
        torch._foreach_addcdiv_(parameters, numerators, denominators, -learning_rate)


def bias_corrections(beta: float, steps: list[Tensor]) -> list[Any]:
    """1 - beta^t for each 0-d count t: floats for counts on the CPU, else 0-d tensors, as reading would wait.

    Under torch.compile always tensors. They keep their digits where beta^t is near 1 in float32.
    """
    if all(step.is_cpu for step in steps) and not torch.compiler.is_compiling():
        return [1.0 - beta ** step.item() for step in steps]
    if beta == 0.0:
        return [torch.ones_like(step) for step in steps]
    corrections = list(torch._foreach_mul(steps, math.log(beta)))
    torch._foreach_expm1_(corrections)
    torch._foreach_neg_(corrections)
    return corrections


def restore_state_dtypes(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Put the saved dtypes back after ``Optimizer.load_state_dict``, which casts state to the parameter's."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        state = optimizer.state[parameter] if key in state_dict["state"] else {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = state_dict["state"][key][name].to(value.device)


class Float32State(Optimizer):
    """Mixin before an optimizer of another library: half-precision parameters get float32 state."""

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        loss = evaluate_closure(closure)
        refuse_sparse_gradients(self)
        with float32_parameters(self.param_groups):
            super().step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        restore_state_dtypes(self, state_dict)


def with_float32_state(optimizer_type: type[Optimizer]) -> type[Optimizer]:
    """``optimizer_type`` with ``Float32State`` before it, under the same name."""
    return type(optimizer_type.__name__, (Float32State, optimizer_type), {})
