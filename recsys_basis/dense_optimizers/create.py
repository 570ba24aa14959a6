"""From a config section and a model to the optimizer of its dense parameters."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recsys_basis.dense_optimizers.balanced_adam import BalancedAdam
from recsys_basis.dense_optimizers.balanced_groups import balanced_adam_groups
from recsys_basis.dense_optimizers.balanced_settings import BalancedSettings
from recsys_basis.dense_optimizers.config import (
    AdafactorConfig,
    AdamWConfig,
    BalancedAdamConfig,
    CustomConfig,
    DenseOptimizerConfig,
    NAdamConfig,
    RAdamConfig,
    SGDConfig,
    SM3Config,
)
from recsys_basis.dense_optimizers.parameter_groups import NamedParameters, group_parameters, matches
from recsys_basis.dense_optimizers.sm3 import SM3
from recsys_basis.dense_optimizers.stepping import HALF_PRECISION, with_float32_state
from recsys_basis.schema import ConfigError


def create_dense_optimizer(
    config: DenseOptimizerConfig,
    model: nn.Module | NamedParameters,
    named_parameters: NamedParameters | None = None,
) -> Optimizer:
    """The optimizer of ``config``, in groups with and without weight decay that carry parameter names.

    model             the module, or the (name, parameter) pairs to step; balanced_adam needs the module,
                      since module types decide its groups
    named_parameters  with a module: those of its parameters to step, under the names that patterns see;
                      default: all

    Parameters that need no gradient are left out. Raises ConfigError if none is left, if balanced_adam gets
    no module, and for a custom optimizer that cannot be imported or does not take its arguments.
    """
    if named_parameters is None:
        named_parameters = model.named_parameters() if isinstance(model, nn.Module) else model
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not trained:
        raise ConfigError(
            f"dense_optimizer {config.name}: the model has no dense parameter that needs a gradient"
        )
    optimizer_type, arguments = _type_and_arguments(config)
    no_decay = config.no_decay if _weight_decay(optimizer_type, arguments) else ()
    if isinstance(config, BalancedAdamConfig):
        groups = _balanced_groups(config, model, trained, no_decay)
    else:
        groups = group_parameters(
            trained, lambda name, _: {"weight_decay": 0.0} if matches(name, no_decay) else {}
        )
    if optimizer_type not in (SM3, BalancedAdam) and _any_half(parameter for _, parameter in trained):
        optimizer_type = with_float32_state(optimizer_type)
    try:
        return optimizer_type(groups, lr=config.learning_rate, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"dense_optimizer {config.name}: {optimizer_type.__name__}(parameters, lr, "
            f"{', '.join(arguments)}) refused its arguments: {error}"
        ) from error


def _type_and_arguments(config: DenseOptimizerConfig) -> tuple[Any, dict[str, Any]]:
    match config:
        case AdamWConfig():
            return torch.optim.AdamW, {**_adam_arguments(config), "foreach": True}
        case NAdamConfig():
            return torch.optim.NAdam, {
                **_adam_arguments(config),
                "momentum_decay": config.momentum_decay,
                "decoupled_weight_decay": config.decoupled,
                "foreach": True,
            }
        case RAdamConfig():
            return torch.optim.RAdam, {
                **_adam_arguments(config),
                "decoupled_weight_decay": config.decoupled,
                "foreach": True,
            }
        case SGDConfig():
            keys = {"momentum", "nesterov", "weight_decay"}
            return torch.optim.SGD, {**config.model_dump(include=keys), "foreach": True}
        case AdafactorConfig():
            return torch.optim.Adafactor, {
                "beta2_decay": config.beta2_decay,
                "eps": (config.eps1, config.eps2),
                "d": config.clip_threshold,
                "weight_decay": config.weight_decay,
                "foreach": True,
            }
        case SM3Config():
            return SM3, config.model_dump(exclude={"name", "learning_rate", "no_decay"})
        case BalancedAdamConfig():
            settings = config.model_dump(include=set(BalancedSettings.model_fields))
            own = {**_adam_arguments(config), "decoupled": config.decoupled, "foreach": True}
            return BalancedAdam, {**own, **settings}
        case CustomConfig():
            return _import_optimizer(config.target), dict(config.arguments)
    raise TypeError(f"{type(config).__name__} is not the section of a dense optimizer")


def _adam_arguments(
    config: AdamWConfig | NAdamConfig | RAdamConfig | BalancedAdamConfig,
) -> dict[str, Any]:
    return {
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }


def _weight_decay(optimizer_type: type[Optimizer], arguments: Mapping[str, Any]) -> Any:
    """What decay the class is given, or has unasked; None where it has no such argument."""
    own = inspect.signature(optimizer_type).parameters.get("weight_decay")
    return arguments.get("weight_decay", None if own is None else own.default)


def _balanced_groups(
    config: BalancedAdamConfig,
    model: nn.Module | NamedParameters,
    trained: NamedParameters,
    no_decay: Sequence[str],
) -> list[dict[str, Any]]:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "dense_optimizer balanced_adam groups parameters by the type of their module: pass the model to "
            "create_dense_optimizer, and the parameters to train as named_parameters"
        )
    return balanced_adam_groups(
        model,
        named_parameters=trained,
        scales=config.group_scales.model_dump(),
        projection_names=config.projection_names,
        layer_betas=(config.beta1, *config.beta2_of_layers) if config.beta2_of_layers else None,
        no_decay=no_decay,
    )


def _import_optimizer(target: str) -> type[Optimizer]:
    """The class that ``target``, package.module.Class, names."""
    key = f"dense_optimizer.target = {target!r}"
    module_name, _, class_name = target.rpartition(".")
    if not (module_name and class_name):
        raise ConfigError(f"{key}: must be package.module.Class, for example torch.optim.Adamax")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        raise ConfigError(f"{key}: cannot import {module_name}: {error}; install its package") from error
    except AttributeError:
        raise ConfigError(f"{key}: {module_name} has no {class_name}") from None
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"{key}: is not a subclass of torch.optim.Optimizer")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"{key}: its step needs a closure, which training has not; choose another")
    return found


def _any_half(parameters: Iterable[nn.Parameter]) -> bool:
    return any(parameter.dtype in HALF_PRECISION for parameter in parameters)
