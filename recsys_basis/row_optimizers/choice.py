"""Which row optimizer each table takes: the part that the configs of a run and of a plan share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import SerializeAsAny, field_validator

from recsys_basis.by_table import choose_by_table
from recsys_basis.row_optimizers import parse_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.row_optimizers.basis.budget import solve_state_budgets
from recsys_basis.schema import Section
from recsys_basis.tables import Table


class RowOptimizerChoice(Section):
    """Sections ``row_optimizer`` and ``table_row_optimizers``."""

    row_optimizer: SerializeAsAny[RowOptimizerConfig]
    table_row_optimizers: dict[str, SerializeAsAny[RowOptimizerConfig]] | None
    """Of single tables, by name or glob; an exact name counts before a glob, then the first that fits."""

    def of_tables(self, tables: Sequence[Table]) -> dict[str, RowOptimizerConfig]:
        """The row optimizer of each table, by its name, as the config says it.

        Raises ConfigError for a name or glob that decides no table.
        """
        names = [table.name for table in tables]
        apart = self.table_row_optimizers or {}
        return choose_by_table(self.row_optimizer, apart, names, "table_row_optimizers")

    def solved_for_tables(self, tables: Sequence[Table]) -> dict[str, RowOptimizerConfig]:
        """As ``of_tables``, state budgets solved. Raises ConfigError, too, for one that cannot be met."""
        return solve_state_budgets(self.of_tables(tables), tables)

    @field_validator("row_optimizer", mode="before")
    @classmethod
    def _row_optimizer(cls, value: Any) -> Any:
        return value if isinstance(value, RowOptimizerConfig) else parse_row_optimizer(value)

    @field_validator("table_row_optimizers", mode="before")
    @classmethod
    def _table_row_optimizers(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {tables: _named_row_optimizer(each, tables) for tables, each in value.items()}


def _named_row_optimizer(value: Any, tables: str) -> RowOptimizerConfig:
    """From a file's name, from ``base`` = a file's name and the keys that differ, or from a whole section."""
    if isinstance(value, RowOptimizerConfig):
        return value
    if isinstance(value, str):
        return row_optimizer_defaults(value)
    if not isinstance(value, dict):
        raise ValueError(
            f"{tables}: {value!r} is neither a file's name in configs/row_optimizer nor a section"
        )
    if "base" not in value:
        return parse_row_optimizer(value)
    return row_optimizer_defaults(
        value["base"], **{key: each for key, each in value.items() if key != "base"}
    )
