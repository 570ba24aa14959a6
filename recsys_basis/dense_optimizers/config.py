"""Config sections of the dense optimizers, one for each name; values in configs/dense_optimizer/*.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import Field, model_validator

from recsys_basis.config_folder import config_folder
from recsys_basis.dense_optimizers.balanced_settings import BalancedSettings
from recsys_basis.schema import ConfigError, Section, parse_section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Patterns = Annotated[tuple[str, ...], Field(strict=False)]
"""Glob patterns of parameter names; YAML has lists, sections have tuples."""


class DenseOptimizerConfig(Section):
    """Keys that every dense optimizer has."""

    name: str
    """Key of ``DENSE_OPTIMIZERS``."""
    learning_rate: NonNegative
    """eta, before the schedule's factor."""
    no_decay: Patterns
    """Parameters whose dotted name fits one of these have no weight decay."""


class AdamWConfig(DenseOptimizerConfig):
    """torch.optim.AdamW."""

    name: Literal["adamw"]
    beta1: Beta
    beta2: Beta
    eps: NonNegative
    weight_decay: NonNegative


class SGDConfig(DenseOptimizerConfig):
    """torch.optim.SGD; weight decay is added to the gradient."""

    name: Literal["sgd"]
    momentum: Beta
    nesterov: bool
    weight_decay: NonNegative

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDConfig:
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov = true looks ahead along the momentum, so momentum must be > 0")
        return self


class NAdamConfig(DenseOptimizerConfig):
    """torch.optim.NAdam."""

    name: Literal["nadam"]
    beta1: Beta
    beta2: Beta
    eps: NonNegative
    momentum_decay: NonNegative
    weight_decay: NonNegative
    decoupled: bool
    """true: weight decay as AdamW's; false: added to the gradient."""


class RAdamConfig(DenseOptimizerConfig):
    """torch.optim.RAdam."""

    name: Literal["radam"]
    beta1: Beta
    beta2: Beta
    eps: NonNegative
    weight_decay: NonNegative
    decoupled: bool
    """true: weight decay as AdamW's; false: added to the gradient."""


class AdafactorConfig(DenseOptimizerConfig):
    """torch.optim.Adafactor: row and column averages, no momentum, steps relative to the weights' size."""

    name: Literal["adafactor"]
    beta2_decay: Annotated[float, Field(le=0.0)]
    """beta2 of step t is 1 - t ** beta2_decay."""
    eps1: NonNegative | None
    """Floor of the second moment is eps1 squared; null: the smallest distance from 1 in the dtype."""
    eps2: NonNegative
    """Floor of the weights' root mean square that steps are relative to."""
    clip_threshold: Annotated[float, Field(ge=1.0)]
    """Largest root mean square of an update before the learning rate."""
    weight_decay: NonNegative


class SM3Config(DenseOptimizerConfig):
    """``SM3``, see sm3.py."""

    name: Literal["sm3"]
    variant: Literal["I", "II", "max"]
    momentum: Beta
    bfloat16_momentum: bool
    beta2: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    eps: NonNegative
    weight_decay: NonNegative


class GroupScales(Section):
    """Factor on V of each kind of parameter, in the early phase of Balanced Adam (``balanced_groups.py``)."""

    conv: Positive
    linear_projection: Positive
    linear_mlp: Positive
    norm: Positive
    embedding: Positive
    bias: Positive
    other: Positive


class BalancedAdamConfig(DenseOptimizerConfig, BalancedSettings):
    """``BalancedAdam``, see balanced_adam.py."""

    name: Literal["balanced_adam"]
    beta1: Beta
    beta2: Beta
    beta2_of_layers: Annotated[tuple[Beta, Beta], Field(strict=False)] | None
    """beta2 of the first and of the last layer, between them by depth; null: ``beta2`` everywhere."""
    eps: NonNegative
    weight_decay: NonNegative
    decoupled: bool
    """true: weight decay as AdamW's; false: added to the gradient."""
    group_scales: GroupScales
    projection_names: Patterns
    """Weights whose dotted name fits one of these are linear_projection, not linear_mlp."""


class CustomConfig(DenseOptimizerConfig):
    """Any subclass of torch.optim.Optimizer from an installed package."""

    name: Literal["custom"]
    target: str
    """package.module.Class."""
    arguments: dict[str, Any]
    """Keyword arguments of the class, besides the parameters and lr."""


DENSE_OPTIMIZERS: dict[str, type[DenseOptimizerConfig]] = {
    "adamw": AdamWConfig,
    "sm3": SM3Config,
    "balanced_adam": BalancedAdamConfig,
    "adafactor": AdafactorConfig,
    "sgd": SGDConfig,
    "nadam": NAdamConfig,
    "radam": RAdamConfig,
    "custom": CustomConfig,
}


def parse_dense_optimizer(values: Mapping[str, Any], where: str = "dense_optimizer") -> DenseOptimizerConfig:
    """Validate the section ``values`` as the section of its ``name``.

    Raises ConfigError, naming each bad key under ``where``.
    """
    name = values.get("name")
    if not (isinstance(name, str) and name in DENSE_OPTIMIZERS):
        raise ConfigError(f"{where}.name = {name!r}: must be one of {', '.join(DENSE_OPTIMIZERS)}")
    return parse_section(DENSE_OPTIMIZERS[name], values, where)


def dense_optimizer_defaults(name: str, **overrides: Any) -> DenseOptimizerConfig:
    """The validated section configs/dense_optimizer/<name>.yaml with ``overrides`` on top.

    For Python users and tests; jobs compose the same file by Hydra. Raises ConfigError for an unknown name or
    a bad override.
    """
    path = config_folder() / "dense_optimizer" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise ConfigError(f"dense_optimizer = {name!r}: there is no {path}; known: {known}")
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert isinstance(values, dict)
    return parse_dense_optimizer({str(key): value for key, value in values.items()} | overrides)
