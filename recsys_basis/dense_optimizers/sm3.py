"""SM3: the second moment of a tensor from one vector per axis.

Rohan Anil, Vineet Gupta, Tomer Koren, Yoram Singer: Memory-Efficient Adaptive Optimization, NeurIPS 2019
(arXiv 1901.11150). A tensor is covered by its slices: entry i of an n x m matrix lies in one row and one
column, and each slice r keeps one number mu(r), so n + m numbers stand for Adagrad's n m. With g the
gradient:

    I    (Algorithm SM3-I)   mu(r) += max of g(i)^2 over i in r
                             nu(i) = min of mu(r) over the r that hold i
    II   (Algorithm SM3-II)  nu(i) = min of mu(r) over the r that hold i, + g(i)^2
                             mu(r) = max of nu(i) over i in r
    max  (a simpler rule)    mu(r) = max of mu(r) and of g(i)^2 over i in r
                             nu(i) = max of mu(r) over the r that hold i

    all                      w -= eta g / sqrt(nu), where 0/0 = 0

The paper proves (sum of g^2) <= nu_II <= nu_I entry by entry, so II takes the larger steps and is the
default.

Where ours differs from the paper:

1. ``eps`` is added under the root and is never below the smallest normal float. That makes 0/0 = 0, and
   bounds the step of a gradient so small that its square is zero in float32.
2. Momentum averages the steps: m = beta1 m + (1 - beta1) g / sqrt(nu), w -= eta m. The paper uses momentum in
   its experiments but leaves it out of its algorithms.
3. ``beta2`` turns the sums into averages, as in Adam: mu decays by beta2 and g^2 enters with 1 - beta2.
   Adam's bias correction goes with it; without it the first steps would be larger by 1 / sqrt(1 - beta2).
4. ``weight_decay`` is decoupled, as AdamW's.
5. Tensors of rank 0 and 1 have no smaller cover than their entries: there every variant is diagonal Adagrad.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from recsys_basis.dense_optimizers.stepping import (
    Closure,
    ParameterGroup,
    TensorList,
    bias_corrections,
    decay_weights,
    evaluate_closure,
    float32_parameters,
    refuse_sparse_gradients,
    restore_state_dtypes,
    subtract,
)


class SM3(Optimizer):
    """SM3 over axis slices: the state of an n_1 x ... x n_k tensor is n_1 + ... + n_k numbers.

    lr            eta; a float, or a 0-d tensor that may change in place
    variant       "II", "I" or "max", see the module
    momentum      beta1 in [0, 1); 0 keeps none, else it is one number an entry more
    bfloat16_momentum  keep the momentum in 2 bytes an entry. For beta1 up to about 0.95: a step that changes
                  the momentum by less than 0.2 % is lost
    beta2         None sums squared gradients for ever, as the paper; in (0, 1) averages them with that decay
    eps           added under the root
    weight_decay  lambda, decoupled: w -= eta lambda w

    State is float32, also for half-precision parameters, and float64 for float64 ones: ``cover_a`` is the
    vector of axis a, of shape [1, .., n_a, .., 1]; ``momentum`` has the parameter's shape; ``step`` is 0-d,
    with beta2 only. Nothing in a step reads a tensor on the host, so CUDA graphs can capture it from the
    second on.

    Raises ValueError for settings out of bounds, RuntimeError in ``step`` for sparse or complex gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        *,
        variant: Literal["I", "II", "max"] = "II",
        momentum: float = 0.0,
        bfloat16_momentum: bool = False,
        beta2: float | None = None,
        eps: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "variant": variant,
            "momentum": momentum,
            "bfloat16_momentum": bfloat16_momentum,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParameterGroup) -> None:
        super().add_param_group(param_group)
        _check_settings(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns the loss of ``closure``, if given."""
        loss = evaluate_closure(closure)
        refuse_sparse_gradients(self)
        with float32_parameters(self.param_groups):
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        restore_state_dtypes(self, state_dict)

    def _step_group(self, group: ParameterGroup) -> None:
        parameters = [each for each in group["params"] if each.grad is not None and each.numel() > 0]
        if not parameters:
            return
        # From second moment to step in the same memory: fresh pages cost more than the arithmetic.
        updates: TensorList = [self._second_moment(each, each.grad, group) for each in parameters]
        if group["beta2"] is not None:
            torch._foreach_div_(updates, self._bias_corrections(parameters, group["beta2"]))
        torch._foreach_add_(updates, max(group["eps"], torch.finfo(torch.float32).tiny))
        torch._foreach_rsqrt_(updates)
        torch._foreach_mul_(updates, [each.grad for each in parameters])
        if group["momentum"] > 0.0:
            updates = self._averaged(parameters, updates, group)
        decay_weights(parameters, group["lr"], group["weight_decay"])
        subtract(parameters, updates, group["lr"])

    def _second_moment(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> Tensor:
        """nu of one parameter, a fresh tensor of its shape, after entering ``gradient`` into its covers."""
        state, beta2 = self.state[parameter], group["beta2"]
        if not state:
            state.update(_empty_covers(parameter))
        covers = [state[f"cover_{axis}"] for axis in range(max(1, parameter.dim()))]
        keep, add = (1.0, 1.0) if beta2 is None else (beta2, 1.0 - beta2)
        return _VARIANTS[group["variant"]](covers, gradient, keep, add)

    def _bias_corrections(self, parameters: list[Tensor], beta2: float) -> list[Any]:
        """1 - beta2^t of each parameter for its update number t."""
        for parameter in parameters:
            if "step" not in self.state[parameter]:
                zero = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter]["step"] = zero
        steps = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(steps, 1.0)
        return bias_corrections(beta2, steps)

    def _averaged(self, parameters: list[Tensor], updates: TensorList, group: ParameterGroup) -> TensorList:
        """The momenta after entering ``updates``; they may be the state itself, so are not to be changed."""
        states = [self.state[each] for each in parameters]
        dtype = torch.bfloat16 if group["bfloat16_momentum"] else None
        for state, parameter in zip(states, parameters, strict=True):
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter, dtype=dtype)
        momenta = [state["momentum"] for state in states]
        if dtype is None:
            torch._foreach_lerp_(momenta, updates, 1.0 - group["momentum"])
            return momenta
        torch._foreach_mul_(updates, 1.0 - group["momentum"])
        torch._foreach_add_(updates, momenta, alpha=group["momentum"])
        torch._foreach_copy_(momenta, updates)
        return updates


def _empty_covers(parameter: Tensor) -> dict[str, Tensor]:
    if parameter.dim() <= 1:
        return {"cover_0": torch.zeros_like(parameter)}
    covers = {}
    for axis, size in enumerate(parameter.shape):
        shape = [1] * parameter.dim()
        shape[axis] = size
        covers[f"cover_{axis}"] = parameter.new_zeros(shape)
    return covers


def _largest_of_slices(values: Tensor, axis: int) -> Tensor:
    """Maximum of each slice of ``axis``, shaped as its cover; up to rank 1 the slices are the entries."""
    others = [other for other in range(values.dim()) if other != axis]
    return values.amax(others, keepdim=True) if others else values


def _variant_1(covers: list[Tensor], gradient: Tensor, keep: float, add: float) -> Tensor:
    squares = gradient.square()
    for axis, cover in enumerate(covers):
        cover.mul_(keep).add_(_largest_of_slices(squares, axis), alpha=add)
    return _over_covers(torch.minimum, covers, out=squares)


def _variant_2(covers: list[Tensor], gradient: Tensor, keep: float, add: float) -> Tensor:
    if keep != 1.0:
        torch._foreach_mul_(covers, keep)
    second_moment = _over_covers(torch.minimum, covers, out=torch.empty_like(gradient))
    second_moment.addcmul_(gradient, gradient, value=add)
    for axis, cover in enumerate(covers):
        cover.copy_(_largest_of_slices(second_moment, axis))
    return second_moment


def _variant_max(covers: list[Tensor], gradient: Tensor, keep: float, add: float) -> Tensor:
    if gradient.dim() <= 1:
        return _variant_1(covers, gradient, keep, add)
    squares = gradient.square()
    for axis, cover in enumerate(covers):
        largest = _largest_of_slices(squares, axis)
        if keep == 1.0:
            torch.maximum(cover, largest, out=cover)
        else:
            cover.lerp_(largest, add)
    return _over_covers(torch.maximum, covers, out=squares)


_VARIANTS: dict[str, Callable[[list[Tensor], Tensor, float, float], Tensor]] = {
    "I": _variant_1,
    "II": _variant_2,
    "max": _variant_max,
}
"""(covers, gradient, keep, add) -> nu: old covers count ``keep`` times, the new square ``add`` times."""


def _over_covers(extremum: Callable[..., Tensor], covers: list[Tensor], out: Tensor) -> Tensor:
    """For each entry the minimum or maximum over its slices, written to ``out``."""
    out.copy_(covers[0])
    for cover in covers[1:]:
        extremum(out, cover, out=out)
    return out


def _check_settings(group: ParameterGroup) -> None:
    lr, variant, momentum, beta2 = (group[key] for key in ("lr", "variant", "momentum", "beta2"))
    if isinstance(lr, Tensor):
        if lr.dim() > 0:
            raise ValueError(f"lr has shape {list(lr.shape)}, must be a float or a 0-d tensor")
    elif lr < 0.0:
        raise ValueError(f"lr = {lr}, must be >= 0")
    if variant not in _VARIANTS:
        raise ValueError(f"variant = {variant!r}, must be one of {', '.join(_VARIANTS)}")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum = {momentum}, must be in [0, 1)")
    if beta2 is not None and not 0.0 < beta2 < 1.0:
        raise ValueError(f"beta2 = {beta2}, must be None or in (0, 1)")
    for key in ("eps", "weight_decay"):
        if group[key] < 0.0:
            raise ValueError(f"{key} = {group[key]}, must be >= 0")
