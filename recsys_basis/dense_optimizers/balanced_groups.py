"""Balanced Adam's groups: what kind of module a parameter belongs to, and how deep it lies.

The kind decides the scale of the second moment in the early phase; the depth, where wanted, decides its
decay for the whole of training. Both become options of torch parameter groups: nothing is attached to a
parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from recsys_basis.dense_optimizers.parameter_groups import NamedParameters, group_parameters, matches

GROUP_SCALES: Mapping[str, float] = {
    "conv": 1.0,
    "linear_projection": 0.8,
    "linear_mlp": 1.2,
    "norm": 0.6,
    "embedding": 1.0,
    "bias": 0.4,
    "other": 1.0,
}
"""Factor on V of each kind. Embeddings and whatever is none of the kinds are left alone."""

PROJECTION_NAMES = ("*proj*", "*cross*")
"""Names of weights that map between spaces (attention, low-rank cross layers) rather than form an MLP."""


def balanced_adam_groups(
    model: nn.Module,
    *,
    named_parameters: NamedParameters | None = None,
    scales: Mapping[str, float] = GROUP_SCALES,
    projection_names: Sequence[str] = PROJECTION_NAMES,
    layer_betas: tuple[float, float, float] | None = None,
    no_decay: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups for ``BalancedAdam``, each with ``kind`` and ``group_scale``.

    model             gives the type of the module that owns each parameter
    named_parameters  those to group, with the names that patterns see; default: all of ``model``
    scales            factor on V of each kind; must name all kinds
    layer_betas       (beta1, beta2 of the first layer, beta2 of the last), see ``layer_beta2``; None: not set
    no_decay          glob patterns of names that get weight_decay = 0

    Raises ValueError for kinds that are missing or unknown in ``scales``, and for a parameter not in
    ``model``.
    """
    if scales.keys() != GROUP_SCALES.keys():
        raise ValueError(f"scales names {sorted(scales)}, must name each of {sorted(GROUP_SCALES)}")
    kinds = parameter_kinds(model, projection_names)
    beta2 = layer_beta2(model, *layer_betas[1:]) if layer_betas else {}

    def options(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        if parameter not in kinds:
            raise ValueError(f"parameter {name} is not part of the model whose modules give the groups")
        chosen: dict[str, Any] = {"kind": kinds[parameter], "group_scale": scales[kinds[parameter]]}
        if layer_betas:
            chosen["betas"] = (layer_betas[0], beta2[parameter])
        if matches(name, no_decay):
            chosen["weight_decay"] = 0.0
        return chosen

    named = model.named_parameters() if named_parameters is None else named_parameters
    return group_parameters(named, options)


def parameter_kinds(
    model: nn.Module, projection_names: Sequence[str] = PROJECTION_NAMES
) -> dict[nn.Parameter, str]:
    """Kind of every parameter of ``model``, a key of ``GROUP_SCALES``. A shared one is its first owner's.

    bias               its own name ends in "bias" (in a ParameterList: the list's name), in whatever module
    conv               weight of a convolution
    norm               weight of a module whose class is called ...Norm...
    embedding          weight of an Embedding or EmbeddingBag
    linear_projection  another weight of rank >= 2 whose dotted name fits ``projection_names``
    linear_mlp         weight of any other Linear
    other              everything else
    """
    kinds: dict[nn.Parameter, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(module_name, recurse=False):
            kinds.setdefault(parameter, _kind(module, name, parameter, projection_names))
    return kinds


def layer_beta2(model: nn.Module, first: float = 0.99, last: float = 0.9999) -> dict[nn.Parameter, float]:
    """beta2 of each parameter by its layer's depth, from ``first`` at the input to ``last`` at the output.

    A layer is a module that owns parameters itself; depth is the order of definition. The horizon 1 / (1 -
    beta2) grows by the same factor from layer to layer: 100 steps to 10,000 for the default ends.
    """
    layers = [
        module for module in model.modules() if next(module.parameters(recurse=False), None) is not None
    ]
    chosen: dict[nn.Parameter, float] = {}
    for depth, layer in enumerate(layers):
        share = depth / max(1, len(layers) - 1)
        beta2 = 1.0 - (1.0 - first) ** (1.0 - share) * (1.0 - last) ** share
        for parameter in layer.parameters(recurse=False):
            chosen.setdefault(parameter, beta2)
    return chosen


def _kind(module: nn.Module, name: str, parameter: nn.Parameter, projection_names: Sequence[str]) -> str:
    parts = name.split(".")
    own_name = parts[-2] if isinstance(module, nn.ParameterList) and len(parts) > 1 else parts[-1]
    if own_name.endswith("bias"):
        return "bias"
    if isinstance(module, _ConvNd):
        return "conv"
    if "Norm" in type(module).__name__:
        return "norm"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if parameter.dim() >= 2 and matches(name, projection_names):
        return "linear_projection"
    return "linear_mlp" if isinstance(module, nn.Linear) else "other"
