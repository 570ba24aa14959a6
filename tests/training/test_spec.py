"""How the config says which row optimizer a table takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_config

from recsys_basis.config import compose_job
from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.schema import ConfigError, parse_section
from recsys_basis.training.spec import TrainConfig


def config_of(value: Any) -> TrainConfig:
    return parse_section(TrainConfig, compose_job("train", []) | {"table_row_optimizers": {"C3": value}})


def test_a_table_takes_a_file_or_a_file_and_what_differs_or_a_whole_section() -> None:
    whole = row_optimizer_defaults("basis", rows_per_bucket=10.0, learning_rate=0.5)
    values = ({"base": "basis", "rows_per_bucket": 10, "learning_rate": 0.5}, whole.model_dump(), whole)
    for value in values:
        assert config_of(value).table_row_optimizers == {"C3": whole}
    assert config_of("adam").table_row_optimizers == {"C3": row_optimizer_defaults("adam")}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("adamm", "'adamm': there is no"),
        (3, "table_row_optimizers: C3: 3 is neither"),
        ({"base": "adam", "rows_per_bucket": 10}, "rows_per_bucket"),
        ({"base": "basis", "beta2": 1.0}, "beta2"),
        ({"learning_rate": 0.1}, "rule"),
        ({"rule": "sgd", "learning_rate": 0.1}, "weight_decay"),
    ],
)
def test_a_bad_value_is_refused_by_its_key(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="table_row_optimizers") as refusal:
        config_of(value)
    assert words in str(refusal.value)


def test_the_command_line_takes_names_globs_and_the_common_learning_rate() -> None:
    adam = "{base: adam, learning_rate: ${row_optimizer.learning_rate}}"
    given = f"table_row_optimizers={{C3: {adam}, C1?: sgd}}"
    config = tiny_config(Path("prepared"), Path("run"), given, "+table_row_optimizers.C20=adagrad")
    expected: dict[str, RowOptimizerConfig] = {
        "C3": row_optimizer_defaults("adam", learning_rate=config.row_optimizer.learning_rate),
        "C1?": row_optimizer_defaults("sgd"),
        "C20": row_optimizer_defaults("adagrad"),
    }
    assert config.table_row_optimizers == expected
    assert parse_section(TrainConfig, config.model_dump(mode="json")) == config  # what a run saves is whole
