"""Which table takes which row optimizer; a name that fits nothing is refused with the names that would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_config

from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.row_optimizers.by_table import TableRowOptimizer, choose_row_optimizers
from recsys_basis.schema import ConfigError, parse_section
from recsys_basis.training.spec import TrainConfig

TABLES = ("C1", "C2", "C10", "C11")
BASIS = row_optimizer_defaults("basis")


def entries_of(*values: dict[str, Any]) -> tuple[TableRowOptimizer, ...]:
    return tuple(parse_section(TableRowOptimizer, value) for value in values)


def rules(*values: dict[str, Any]) -> list[str]:
    chosen = choose_row_optimizers(BASIS, entries_of(*values), TABLES)
    assert list(chosen) == list(TABLES)
    return [config.rule for config in chosen.values()]


def test_without_entries_all_take_the_default() -> None:
    assert choose_row_optimizers(BASIS, (), TABLES) == dict.fromkeys(TABLES, BASIS)


def test_names_and_globs_choose_and_the_last_entry_decides() -> None:
    adam = {"tables": ["C1?"], "row_optimizer": "adam"}
    sgd = {"tables": ["C2", "C11"], "row_optimizer": "sgd"}
    assert rules({"tables": ["C1"], "row_optimizer": "adam"}) == ["adam", "basis", "basis", "basis"]
    assert rules(adam) == ["basis", "basis", "adam", "adam"]
    assert rules(adam, sgd) == ["basis", "sgd", "adam", "sgd"]
    assert rules(sgd, adam) == ["basis", "sgd", "adam", "adam"]
    assert rules({"tables": ["C[12]"], "row_optimizer": "sgd"}) == ["sgd", "sgd", "basis", "basis"]


def test_an_entry_is_a_file_or_a_file_and_what_differs_or_a_whole_section() -> None:
    whole = row_optimizer_defaults("basis", rows_per_bucket=10.0, learning_rate=0.5)
    for value in (
        {"base": "basis", "rows_per_bucket": 10, "learning_rate": 0.5},
        whole.model_dump(),
        whole,
    ):
        (entry,) = entries_of({"tables": ["C1"], "row_optimizer": value})
        assert entry.row_optimizer == whole
    (entry,) = entries_of({"tables": ["C1"], "row_optimizer": "adam"})
    assert entry.row_optimizer == row_optimizer_defaults("adam")


@pytest.mark.parametrize("pattern", ["C3", "D*", "c1", ""])
def test_a_name_that_fits_no_table_is_refused_with_the_tables(pattern: str) -> None:
    good = {"tables": ["C1"], "row_optimizer": "adam"}
    with pytest.raises(ConfigError) as refusal:
        rules(good, {"tables": ["C2", pattern], "row_optimizer": "adam"})
    words = f"table_row_optimizers.1.tables: {pattern!r} fits no table; they are C1, C2, C10, C11"
    assert str(refusal.value) == words


def test_an_entry_that_decides_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"table_row_optimizers\.0 has no effect"):
        rules({"tables": ["C10"], "row_optimizer": "adam"}, {"tables": ["C1*"], "row_optimizer": "sgd"})


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"tables": [], "row_optimizer": "adam"}, "tables"),
        ({"tables": "C1", "row_optimizer": "adam"}, "tables"),
        ({"tables": ["C1"]}, "missing key 'row_optimizer'"),
        ({"tables": ["C1"], "row_optimizer": "adamm"}, "adamm"),
        ({"tables": ["C1"], "row_optimizer": 3}, "3 is neither a name"),
        ({"tables": ["C1"], "row_optimizer": {"base": "adam", "rows_per_bucket": 10}}, "rows_per_bucket"),
        ({"tables": ["C1"], "row_optimizer": {"base": "basis", "beta2": 1.0}}, "beta2"),
        ({"tables": ["C1"], "row_optimizer": {"learning_rate": 0.1}}, "rule"),
        ({"tables": ["C1"], "row_optimizer": "adam", "eps": 1e-6}, "unknown key 'eps'"),
    ],
)
def test_a_bad_entry_is_refused_by_its_key(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        entries_of(entry)


def test_the_command_line_takes_names_globs_and_the_learning_rate_above() -> None:
    given = (
        "[{tables: [C3, C1?], row_optimizer: {base: adam, learning_rate: ${row_optimizer.learning_rate}}}]"
    )
    config = tiny_config(Path("prepared"), Path("run"), f"table_row_optimizers={given}")
    (entry,) = config.table_row_optimizers
    assert entry.tables == ("C3", "C1?")
    assert entry.row_optimizer == row_optimizer_defaults(
        "adam", learning_rate=config.row_optimizer.learning_rate
    )
    assert parse_section(TrainConfig, config.model_dump(mode="json")) == config  # what a run saves is whole
