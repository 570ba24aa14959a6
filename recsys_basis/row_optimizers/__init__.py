"""The shelf of row optimizers: every rule by name, and how a config becomes one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from omegaconf import OmegaConf

from recsys_basis.config_folder import config_folder
from recsys_basis.row_optimizers.adafactor import Adafactor
from recsys_basis.row_optimizers.adagrad import Adagrad
from recsys_basis.row_optimizers.adam import Adam
from recsys_basis.row_optimizers.base import RowOptimizer, RowOptimizerConfig
from recsys_basis.row_optimizers.basis import Basis
from recsys_basis.row_optimizers.clipping import RowClip
from recsys_basis.row_optimizers.count_sketch_adam import CountSketchAdam
from recsys_basis.row_optimizers.partial_rowwise_adam import PartialRowwiseAdam
from recsys_basis.row_optimizers.rowwise_adagrad import RowwiseAdagrad
from recsys_basis.row_optimizers.sgd import SGD
from recsys_basis.row_optimizers.sm3 import SM3
from recsys_basis.schema import ConfigError, parse_section
from recsys_basis.tables import TableShard

ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "basis": Basis,
    "adam": Adam,
    "partial_rowwise_adam": PartialRowwiseAdam,
    "rowwise_adagrad": RowwiseAdagrad,
    "adagrad": Adagrad,
    "sm3": SM3,
    "adafactor": Adafactor,
    "count_sketch_adam": CountSketchAdam,
    "sgd": SGD,
}


def row_optimizer_class(rule: str, where: str = "row_optimizer") -> type[RowOptimizer]:
    """The class of ``rule``: a name in ``ROW_OPTIMIZERS``, or ``package.module:Class`` of your own.

    Raises ConfigError, naming ``where``.rule, for an unknown name, a module that cannot be imported, and
    anything that is not a subclass of RowOptimizer.
    """
    if rule in ROW_OPTIMIZERS:
        return ROW_OPTIMIZERS[rule]
    key = f"{where}.rule = {rule!r}"
    module_name, colon, class_name = rule.partition(":")
    if not (colon and module_name and class_name):
        names = ", ".join(ROW_OPTIMIZERS)
        raise ConfigError(f"{key}: must be one of {names}, or package.module:Class of your own rule")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}: cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, RowOptimizer)):
        raise ConfigError(f"{key}: is not a subclass of {RowOptimizer.__module__}.RowOptimizer")
    return found


def parse_row_optimizer(values: Mapping[str, Any], where: str = "row_optimizer") -> RowOptimizerConfig:
    """Validate the section ``values`` with the config class of its rule.

    Raises ConfigError, naming each bad key under ``where``.
    """
    rule = values.get("rule")
    if not isinstance(rule, str):
        raise ConfigError(
            f"{where}.rule = {rule!r}: must name the update rule, one of {', '.join(ROW_OPTIMIZERS)}"
        )
    return parse_section(row_optimizer_class(rule, where).config_type, values, where)


def create_row_optimizer(
    config: RowOptimizerConfig, shards: Sequence[TableShard], device: torch.device | str = "cpu"
) -> RowOptimizer:
    """The row optimizer of ``config`` for a group of table shards, with the state of step 0.

    Raises ConfigError if ``config`` is another rule's section: make it by ``parse_row_optimizer``.
    """
    rule_class = row_optimizer_class(config.rule)
    if not isinstance(config, rule_class.config_type):
        raise ConfigError(
            f"row_optimizer.rule = {config.rule!r} needs a {rule_class.config_type.__name__}, "
            f"not a {type(config).__name__}"
        )
    return rule_class(config, shards, device)


def row_optimizer_defaults(name: str, **overrides: Any) -> RowOptimizerConfig:
    """The validated section configs/row_optimizer/<name>.yaml, without clipping, with ``overrides`` on top.

    For Python users and tests; jobs compose the same files by Hydra. Raises ConfigError for an unknown name
    or a bad override.
    """
    return parse_row_optimizer(_read("", name) | {"clip": _read("clip", "none")} | overrides)


def row_clip_defaults(name: str) -> RowClip:
    """The preset configs/row_optimizer/clip/<name>.yaml. Raises ConfigError for an unknown name."""
    return parse_section(RowClip, _read("clip", name), "row_optimizer.clip")


def _read(group: str, name: str) -> dict[str, Any]:
    folder = config_folder() / "row_optimizer" / group
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise ConfigError(f"row_optimizer = {name!r}: there is no {path}; known: {known}")
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
