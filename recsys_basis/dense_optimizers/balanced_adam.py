"""Balanced Adam: Adam or AdamW, with a second moment that is read with care in the first steps.

Adam: Diederik Kingma, Jimmy Ba, ICLR 2015 (arXiv 1412.6980), Algorithm 1. AdamW: Ilya Loshchilov, Frank
Hutter, ICLR 2019 (arXiv 1711.05101), Algorithm 2. The early memory selection on top is a proposal without a
paper; papers that say "balanced Adam" mean beta1 = beta2, which is something else.

One step t of a parameter in the early phase, t <= early_steps, in Adam's letters:

    1. M, V, t   as Adam's, and stored so: no part below ever writes to them
    2. V'        V, or its largest components                              balanced_pruning.py
    3. M', V'    entries masked, t <= mask_steps                           balanced_masking.py, _signs.py
    4. c         group_scale x clip(cluster scale x channel scale)         balanced_groups.py, _scaling.py
    5. w         -= eta M' / (1 - beta1^t) / (sqrt(c V' / (1 - beta2^t)) + eps)

Parts 2 to 4 change what step 5 reads and nothing else. So nothing compounds over the steps, bias correction
stays Adam's, and the first step after the phase is Adam continued from the state it has: torch's own
function does it. The same holds for rebalancing (``balanced_rebalancing.py``), off by default. All of it is
a function of the gradients, so ranks that hold the same gradients stay the same.

Steps 3 to 5 are passes over memory, many in PyTorch and two or three in C++ (``kernel``); step 1 is always
torch's, so that M and V are Adam's to the bit.

Where ours differs from torch.optim.Adam: half-precision parameters have float32 state; betas are floats;
``fused`` and ``differentiable`` are not offered, since torch's kernels cannot read a changed V.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from recsys_basis.dense_optimizers.balanced_kernel import Kernel
from recsys_basis.dense_optimizers.balanced_masking import MaskedEntry, Masks
from recsys_basis.dense_optimizers.balanced_moving import Move, move
from recsys_basis.dense_optimizers.balanced_pruning import keep_components
from recsys_basis.dense_optimizers.balanced_rebalancing import end_rebalancing, window_factor
from recsys_basis.dense_optimizers.balanced_scaling import clipped_scale, cluster_scales, deviations
from recsys_basis.dense_optimizers.balanced_settings import BalancedSettings
from recsys_basis.dense_optimizers.balanced_signs import forget_flips, sign_counters
from recsys_basis.dense_optimizers.stepping import (
    Closure,
    ParameterGroup,
    bias_corrections,
    decay_weights,
    evaluate_closure,
    float32_parameters,
    refuse_sparse_gradients,
    restore_state_dtypes,
)
from recsys_basis.schema import parse_section


class BalancedAdam(Adam):
    """Adam (AdamW with ``decoupled=True``) with early memory selection.

    lr, betas, eps, weight_decay, amsgrad, foreach, maximize and capturable are torch.optim.Adam's; lr may
    be a 0-d tensor. The rest is explained in ``BalancedSettings`` and may be set for a parameter group, too.
    ``balanced_adam_groups(model)`` makes groups with a scale by module type; without it scales are 1.

    Phases count the steps of a group (``steps_taken``) on the host: capture a CUDA graph after the last of
    them.

    Beside Adam's, state holds, each as long as its phase lasts: ``last_sign`` and ``num_flips`` int8
    (masking, rebalancing), ``window_factor`` (rebalancing), ``measured_scale`` (statistics="freeze").

    Raises ValueError for settings out of bounds, RuntimeError in ``step`` for sparse or complex gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled: bool = False,
        kernel: Kernel = "auto",
        early_steps: int = 50,
        group_scaling: bool = True,
        groups: Literal["module", "cluster"] = "module",
        dimension_scaling: bool = True,
        scale_limit: float = 4.0,
        statistics: Literal["refresh", "freeze"] = "refresh",
        masking: bool = True,
        mask_steps: int = 20,
        mask_threshold: float = 0.3,
        mask_flips: int = 3,
        masked_entry: MaskedEntry = "floor",
        kept_components: float | None = None,
        rebalancing: bool = False,
        rebalance_start: int = 500,
        rebalance_end: int = 2000,
        rebalance_window: int = 10,
        rebalance_flips: int = 5,
        steady_factor: float = 1.3,
        flipping_factor: float = 0.7,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        own = {
            "kind": "other",
            "group_scale": 1.0,
            "steps_taken": 0,
            "kernel": kernel,
            "early_steps": early_steps,
            "group_scaling": group_scaling,
            "groups": groups,
            "dimension_scaling": dimension_scaling,
            "scale_limit": scale_limit,
            "statistics": statistics,
            "masking": masking,
            "mask_steps": mask_steps,
            "mask_threshold": mask_threshold,
            "mask_flips": mask_flips,
            "masked_entry": masked_entry,
            "kept_components": kept_components,
            "rebalancing": rebalancing,
            "rebalance_start": rebalance_start,
            "rebalance_end": rebalance_end,
            "rebalance_window": rebalance_window,
            "rebalance_flips": rebalance_flips,
            "steady_factor": steady_factor,
            "flipping_factor": flipping_factor,
        }
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            decoupled_weight_decay=decoupled,
        )
        self.defaults.update(own)
        for group in self.param_groups:
            _complete(group, self.defaults)

    def add_param_group(self, param_group: ParameterGroup) -> None:
        super().add_param_group(param_group)
        if "steps_taken" in self.defaults:  # not yet while Adam's __init__ adds the first groups
            _complete(self.param_groups[-1], self.defaults)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns the loss of ``closure``, if given."""
        loss = evaluate_closure(closure)
        refuse_sparse_gradients(self)
        with float32_parameters(self.param_groups):
            cluster_scales = self._cluster_scales()
            for group in self.param_groups:
                self._step_group(group, cluster_scales)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also takes a state of torch's Adam or AdamW over the same groups; phases go by Adam's ``step``.

        ``kernel`` stays as this optimizer has it: what computes is no part of a state.
        """
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):
            own = [{**group, "steps_taken": 0} for group in self.param_groups]
            groups = [
                {**ours, **theirs, "kernel": ours["kernel"]} for ours, theirs in zip(own, groups, strict=True)
            ]
        super().load_state_dict({**state_dict, "param_groups": groups})
        restore_state_dtypes(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            _complete(group, self.defaults)
            steps = [int(self.state[each]["step"]) for each in group["params"] if each in self.state]
            group["steps_taken"] = max(group["steps_taken"], *steps, 0)

    def _step_group(self, group: ParameterGroup, cluster_scales: dict[Tensor, Tensor]) -> None:
        tensors = _GroupTensors([], [], [], [], [], [])
        self._init_group(group, *tensors)
        if not tensors.parameters:
            return
        group["steps_taken"] += 1
        if not (_is_early(group) or _is_rebalancing(group)):
            _adam_step(group, tensors)
            return
        _advance_moments(group, tensors)
        self._move(group, tensors, cluster_scales)
        self._free_finished(group)

    def _move(
        self, group: ParameterGroup, tensors: _GroupTensors, cluster_scales: dict[Tensor, Tensor]
    ) -> None:
        """Steps 2 to 5 of the module for a group.

        One parameter after the other, so that its intermediate values are still in the cache when they are
        read, and their memory is free when the next parameter needs some.
        """
        beta1, beta2 = group["betas"]
        for parameter, first, second, correction1, correction2 in zip(
            tensors.parameters,
            tensors.first,
            tensors.largest_second if group["amsgrad"] else tensors.second,
            bias_corrections(beta1, tensors.steps),
            bias_corrections(beta2, tensors.steps),
            strict=True,
        ):
            assert parameter.grad is not None
            scale, rate = 1.0 / correction2, group["lr"] / correction1
            adams = Move(parameter, parameter.grad, first, second, scale, rate, group["eps"])
            move(self._balance(group, adams, cluster_scales.get(parameter)), group["kernel"])

    def _balance(self, group: ParameterGroup, adams: Move, cluster_scale: Tensor | None) -> Move:
        """Adam's move of a parameter, with what steps 2 to 4 of the module or rebalancing change about it."""
        state, gradient = self.state[adams.weights], adams.gradient
        if _is_rebalancing(group):
            factors = _window_factor(group, state, gradient)
            return adams._replace(factors=factors, counters=sign_counters(state, adams.weights))
        masks = _masks(group)
        return adams._replace(
            second=_pruned(group, adams.second),
            masks=masks,
            counters=sign_counters(state, adams.weights) if masks else None,
            scale=adams.scale * (group["group_scale"] if group["group_scaling"] else 1.0),
            measured_scale=_measured_scale(group, state, gradient, cluster_scale),
        )

    def _cluster_scales(self) -> dict[Tensor, Tensor]:
        """The cluster scale of each parameter that needs one in this step; kinds reach over groups."""
        members = {
            parameter: group
            for group in sorted(self.param_groups, key=lambda group: group["kind"])
            if group["group_scaling"] and group["groups"] == "cluster"
            if group["steps_taken"] < group["early_steps"]
            for parameter in group["params"]
            if parameter.grad is not None and parameter.numel() > 1  # one entry has no deviation
        }
        if all("measured_scale" in self.state.get(parameter, {}) for parameter in members):
            return {}
        measured = deviations(
            [each.grad for each in members], [group["kernel"] for group in members.values()]
        )
        scales = cluster_scales(measured, [group["kind"] for group in members.values()])
        return dict(zip(members, scales.unbind(), strict=True))

    def _free_finished(self, group: ParameterGroup) -> None:
        """Drop the counters and frozen scales of a phase that ends with this step."""
        time = group["steps_taken"]
        for state in (self.state.get(each, {}) for each in group["params"]):
            if time in (group["mask_steps"], group["early_steps"]):
                forget_flips(state)
            if time == group["early_steps"]:
                state.pop("measured_scale", None)
            if time == group["rebalance_end"]:
                end_rebalancing(state)


class _GroupTensors(NamedTuple):
    """Of the parameters of a group that have a gradient, in the order of Adam's ``_init_group``."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    first: list[Tensor]
    """M."""
    second: list[Tensor]
    """V."""
    largest_second: list[Tensor]
    """Largest V so far, with amsgrad only."""
    steps: list[Tensor]
    """t, 0-d float32."""


def _is_early(group: ParameterGroup) -> bool:
    parts = (group["group_scaling"], group["dimension_scaling"], group["masking"], group["kept_components"])
    return group["steps_taken"] <= group["early_steps"] and any(parts)


def _is_rebalancing(group: ParameterGroup) -> bool:
    return group["rebalancing"] and group["rebalance_start"] < group["steps_taken"] <= group["rebalance_end"]


def _pruned(group: ParameterGroup, second: Tensor) -> Tensor:
    share = group["kept_components"]
    return second if share is None or second.dim() < 2 else keep_components(second, share)


def _masks(group: ParameterGroup) -> Masks | None:
    if not group["masking"] or group["steps_taken"] > group["mask_steps"]:
        return None
    return Masks(group["mask_threshold"], group["mask_flips"], group["masked_entry"])


def _measured_scale(
    group: ParameterGroup, state: dict[str, Any], gradient: Tensor, cluster_scale: Tensor | None
) -> float | Tensor:
    """clip(cluster scale x channel scale), or what ``state`` keeps of it.

    Dimension 0 of an embedding counts ids: no channel scale.
    """
    if "measured_scale" in state:
        return state["measured_scale"]
    limit = group["scale_limit"]
    if group["dimension_scaling"] and gradient.dim() >= 2 and group["kind"] != "embedding":
        scale = clipped_scale(gradient, cluster_scale, limit, group["kernel"])
    elif cluster_scale is not None:
        scale = cluster_scale.clamp(1.0 / limit, limit)
    else:
        return 1.0
    if group["statistics"] == "freeze":
        state["measured_scale"] = scale
    return scale


def _window_factor(group: ParameterGroup, state: dict[str, Any], gradient: Tensor) -> Tensor | None:
    return window_factor(
        state,
        gradient.dtype,
        steps_done=group["steps_taken"] - group["rebalance_start"] - 1,
        window=group["rebalance_window"],
        most_flips=group["rebalance_flips"],
        steady_factor=group["steady_factor"],
        flipping_factor=group["flipping_factor"],
    )


def _adam_step(group: ParameterGroup, tensors: _GroupTensors) -> None:
    """torch's own step, as torch.optim.Adam.step calls it."""
    beta1, beta2 = group["betas"]
    adam(
        *tensors,
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        foreach=group["foreach"],
        capturable=group["capturable"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
    )


def _advance_moments(group: ParameterGroup, tensors: _GroupTensors) -> None:
    """Weight decay, t, M and V of Adam, in place, by the operations of torch's Adam so that bits agree."""
    beta1, beta2 = group["betas"]
    gradients = tensors.gradients
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    torch._foreach_add_(tensors.steps, 1.0)
    if group["decoupled_weight_decay"]:
        decay_weights(tensors.parameters, group["lr"], group["weight_decay"])
    elif group["weight_decay"] != 0.0:
        gradients = list(torch._foreach_add(gradients, tensors.parameters, alpha=group["weight_decay"]))
    torch._foreach_lerp_(tensors.first, gradients, 1.0 - beta1)
    torch._foreach_mul_(tensors.second, beta2)
    torch._foreach_addcmul_(tensors.second, gradients, gradients, 1.0 - beta2)
    if group["amsgrad"]:
        torch._foreach_maximum_(tensors.largest_second, tensors.second)


def _complete(group: ParameterGroup, defaults: dict[str, Any]) -> None:
    """Fill what ``group`` leaves open. Raises ValueError for what is out of bounds."""
    for key, value in defaults.items():
        group.setdefault(key, value)
    parse_section(BalancedSettings, {key: group[key] for key in BalancedSettings.model_fields})
    if group["group_scale"] <= 0.0:
        raise ValueError(f"group_scale = {group['group_scale']}, must be > 0")
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        raise ValueError("betas must be floats: the early phase cannot read tensors")
