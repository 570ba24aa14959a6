"""The shelf's front: rules by name or by path, sections checked by the rule's own config class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rows import update_rows

from recsys_basis.config_folder import config_folder
from recsys_basis.row_optimizers import (
    ROW_OPTIMIZERS,
    create_row_optimizer,
    parse_row_optimizer,
    row_clip_defaults,
    row_optimizer_class,
    row_optimizer_defaults,
)
from recsys_basis.row_optimizers.adam import AdamConfig
from recsys_basis.row_optimizers.base import RowOptimizer
from recsys_basis.row_optimizers.sgd import SGD
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table, TableShard

SHARDS = [TableShard.whole(Table("site", 10, 2, 1))]
OWN_RULE = """
from recsys_basis.row_optimizers.base import RowOptimizer, RowOptimizerConfig

class SignConfig(RowOptimizerConfig):
    scale: float

class SignSGD(RowOptimizer):
    config_type = SignConfig

    def update(self, weights, rows, gradients, learning_rate):
        weights -= learning_rate * self.config.scale * gradients.sign()

class NotARule:
    pass
"""


def test_every_rule_has_defaults_under_its_name() -> None:
    for name, rule_class in ROW_OPTIMIZERS.items():
        config = row_optimizer_defaults(name)
        assert config.rule == name
        assert type(create_row_optimizer(config, SHARDS)) is rule_class


def test_every_defaults_file_is_valid_and_explains_each_key() -> None:
    folder = config_folder() / "row_optimizer"
    files, clips = sorted(folder.glob("*.yaml")), sorted(folder.glob("clip/*.yaml"))
    assert {file.stem for file in files} == {*ROW_OPTIMIZERS, "basis_literal"}
    for file in files:
        row_optimizer_defaults(file.stem)
    for file in clips:
        row_clip_defaults(file.stem)
    for file in files + clips:
        keys = [line for line in file.read_text().splitlines() if ":" in line and not line.startswith("#")]
        assert all("#" in line for line in keys if not line.startswith("rule:")), file


def test_a_rule_of_ones_own_is_imported_and_checked(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules.py").write_text(OWN_RULE)
    monkeypatch.syspath_prepend(tmp_path)
    values = {"rule": "my_rules:SignSGD", "learning_rate": 0.5, "weight_decay": 0.0, "scale": 2.0}
    values["clip"] = row_clip_defaults("none").model_dump()
    optimizer = create_row_optimizer(parse_row_optimizer(values), SHARDS)
    weights = torch.zeros(10, 2)
    update_rows(optimizer, weights, torch.tensor([3]), torch.tensor([[-7.0, 7.0]]), 0.5)
    assert weights[3].tolist() == [1.0, -1.0] and weights.count_nonzero() == 2
    with pytest.raises(ConfigError, match=r"missing key 'row_optimizer\.scale'"):
        parse_row_optimizer({key: value for key, value in values.items() if key != "scale"})
    with pytest.raises(ConfigError, match="not a subclass"):
        row_optimizer_class("my_rules:NotARule")
    with pytest.raises(ConfigError, match="NoSuchRule"):
        row_optimizer_class("my_rules:NoSuchRule")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("adamm", "must be one of basis, adam"),
        ("no_such_module:Rule", "no_such_module"),
        ("math:", "must be one of"),
        (":Rule", "must be one of"),
        ("math:pi", "not a subclass"),
    ],
)
def test_a_rule_that_is_not_there_is_refused_by_its_key(rule: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer\.rule = '{rule}'.*{reason}"):
        row_optimizer_class(rule, where="optimizer")


@pytest.mark.parametrize("values", [{}, {"rule": None}, {"rule": 3}])
def test_a_section_without_a_rule_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"row_optimizer\.rule"):
        parse_row_optimizer(values)


@pytest.mark.parametrize("name", list(ROW_OPTIMIZERS))
def test_bad_values_are_refused_by_their_key(name: str) -> None:
    for bad in ({"learning_rate": -1.0}, {"weight_decay": -0.1}, {"momentum": 0.9}):
        with pytest.raises(ConfigError, match=rf"row_optimizer\.{next(iter(bad))}\b"):
            row_optimizer_defaults(name, **bad)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("adam", "beta1", 1.0),
        ("adam", "beta2", -0.1),
        ("adam", "eps", 0.0),
        ("partial_rowwise_adam", "beta2", 1.0),
        ("adagrad", "eps", -1.0),
        ("rowwise_adagrad", "eps", 0.0),
        ("sm3", "eps", 0.0),
        ("sm3", "covers", "columns"),
    ],
)
def test_bounds_of_the_rivals(name: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"row_optimizer\.{key}\b"):
        row_optimizer_defaults(name, **{key: value})


def test_unknown_defaults_and_a_section_of_another_rule_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"adamw.*known: adafactor, adagrad, adam, basis"):
        row_optimizer_defaults("adamw")
    wrong = AdamConfig.model_validate(row_optimizer_defaults("adam").model_dump() | {"rule": "basis"})
    with pytest.raises(ConfigError, match="needs a BasisConfig, not a AdamConfig"):
        create_row_optimizer(wrong, SHARDS)


def test_a_rule_without_buckets_says_so() -> None:
    optimizer: RowOptimizer = SGD(row_optimizer_defaults("sgd"), SHARDS)
    with pytest.raises(NotImplementedError, match="SGD keeps no bucket state"):
        optimizer.buckets_of_shard(SHARDS[0], "second_moment")


def test_state_bytes_of_each_rule() -> None:
    """A row: Adam 8D, partial rowwise 4D + 4, Adagrad 4D, Adafactor 8, rowwise Adagrad, SM3 and BASIS 4.

    A bucket: V, M, t; a partition: SM3 4D, Adafactor 4D + 4; a sketch: a fifth of the rows, in three blocks.
    """
    shards = [TableShard.whole(Table("site", 1000, 8, 1))]
    one_partition = create_row_optimizer(row_optimizer_defaults("sm3", covers="rows_and_columns"), shards)
    assert one_partition.state_bytes() == 1000 * 4 + 32
    assert create_row_optimizer(row_optimizer_defaults("adafactor", beta2=0.9), shards).state_bytes() == 4032
    expected = {
        "sm3": 1000 * 4,
        "adafactor": 1000 * 8 + 36,
        "count_sketch_adam": 3 * 67 * 64 + 8,
        "adam": 1000 * 64 + 8,
        "partial_rowwise_adam": 1000 * 36 + 8,
        "adagrad": 1000 * 32,
        "rowwise_adagrad": 1000 * 4,
        "sgd": 0,
        "basis": 1000 * 4 + 1 * (32 + 4) + 8,
        "basis_literal": 1000 * 4 + 10 * (64 + 4),
    }
    for name, num_bytes in expected.items():
        assert create_row_optimizer(row_optimizer_defaults(name), shards).state_bytes() == num_bytes, name
