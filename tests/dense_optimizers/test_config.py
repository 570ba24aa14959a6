"""Sections: every YAML file is one, wrong keys are named."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from recsys_basis.config import compose_job
from recsys_basis.config_folder import config_folder
from recsys_basis.dense_optimizers import DENSE_OPTIMIZERS, dense_optimizer_defaults, parse_dense_optimizer
from recsys_basis.dense_optimizers.balanced_groups import GROUP_SCALES, PROJECTION_NAMES
from recsys_basis.schema import ConfigError

FILES = sorted((config_folder() / "dense_optimizer").glob("*.yaml"))


def test_there_is_a_file_for_every_name_and_it_is_composed() -> None:
    assert {file.stem for file in FILES} == DENSE_OPTIMIZERS.keys()
    for name in DENSE_OPTIMIZERS:
        composed = compose_job("train", [f"dense_optimizer={name}"])["dense_optimizer"]
        assert parse_dense_optimizer(composed) == dense_optimizer_defaults(name)
        assert composed["name"] == name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_key_has_a_default_in_python(file: Any) -> None:
    values = yaml.safe_load(file.read_text())
    for key in values:
        rest = {name: value for name, value in values.items() if name != key}
        with pytest.raises(ConfigError, match=key):
            parse_dense_optimizer(rest)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_key_is_explained(file: Any) -> None:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    own = [line for line in lines if not line.startswith((" ", "name:"))]
    assert [line for line in own if "#" not in line] == []


def test_scales_and_names_are_those_of_the_python_class() -> None:
    config = dense_optimizer_defaults("balanced_adam")
    assert config.group_scales.model_dump() == dict(GROUP_SCALES)
    assert config.projection_names == PROJECTION_NAMES


@pytest.mark.parametrize("name", sorted(DENSE_OPTIMIZERS))
def test_values_survive_a_dump(name: str) -> None:
    config = dense_optimizer_defaults(name)
    assert parse_dense_optimizer(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("adamw", {"beta3": 0.9}, "unknown key 'dense_optimizer.beta3'"),
        ("adamw", {"learning_rate": -1.0}, "dense_optimizer.learning_rate = -1.0"),
        ("adamw", {"beta1": "0.9"}, "dense_optimizer.beta1 = '0.9'"),
        ("adamw", {"no_decay": "*bias"}, "dense_optimizer.no_decay"),
        ("sgd", {"momentum": 0.0, "nesterov": True}, "momentum must be > 0"),
        ("sm3", {"variant": "IV"}, "dense_optimizer.variant = 'IV'"),
        ("sm3", {"beta2": 1.0}, "dense_optimizer.beta2 = 1.0"),
        ("adafactor", {"beta2_decay": 0.8}, "dense_optimizer.beta2_decay = 0.8"),
        ("balanced_adam", {"group_scales": {"bias": 0.4}}, "missing key 'dense_optimizer.group_scales.conv'"),
        ("balanced_adam", {"rebalancing": True, "rebalance_start": 10}, "early_steps <= rebalance_start"),
        ("balanced_adam", {"beta2_of_layers": [0.9]}, "dense_optimizer.beta2_of_layers"),
        ("custom", {"target": 3}, "dense_optimizer.target = 3"),
    ],
)
def test_bad_values_are_named(name: str, override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        dense_optimizer_defaults(name, **override)


@pytest.mark.parametrize("values", [{}, {"name": "lion"}, {"name": ["adamw"]}])
def test_an_unknown_name_lists_the_known(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"towers.name = .*must be one of adamw, sm3, balanced_adam"):
        parse_dense_optimizer(values, where="towers")


def test_an_unknown_file_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="known: adafactor, adamw"):
        dense_optimizer_defaults("lion")
