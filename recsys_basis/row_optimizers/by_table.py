"""Which row optimizer each table takes: one default, and entries that name other tables.

    table_row_optimizers:
      - {tables: [C3, C1?], row_optimizer: adam}
      - {tables: [C12], row_optimizer: {base: basis, rows_per_bucket: 10.0}}

Entries are read in order and the last one that names a table decides. A saved config holds whole
sections, so that it means the same when a default changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import Field, SerializeAsAny, field_validator

from recsys_basis.row_optimizers import parse_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.schema import ConfigError, Section


class TableRowOptimizer(Section):
    """One entry of ``table_row_optimizers``."""

    tables: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Names of tables, or glob patterns of names."""
    row_optimizer: SerializeAsAny[RowOptimizerConfig]
    """A file of configs/row_optimizer by its name; or ``base``, such a name, and keys that differ; or a
    whole section."""

    @field_validator("row_optimizer", mode="before")
    @classmethod
    def _row_optimizer(cls, value: Any) -> RowOptimizerConfig:
        if isinstance(value, RowOptimizerConfig):
            return value
        if isinstance(value, str):
            return row_optimizer_defaults(value)
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is neither a name in configs/row_optimizer nor a section")
        if "base" not in value:
            return parse_row_optimizer(value)
        return row_optimizer_defaults(
            **{"name" if key == "base" else key: each for key, each in value.items()}
        )


def choose_row_optimizers(
    default: RowOptimizerConfig, entries: Sequence[TableRowOptimizer], tables: Sequence[str]
) -> dict[str, RowOptimizerConfig]:
    """The section of each of ``tables``, in their order.

    Raises ConfigError for a name or pattern that fits no table, and for an entry that decides none.
    """
    deciding: dict[str, int | None] = dict.fromkeys(tables)
    for number, entry in enumerate(entries):
        for pattern in entry.tables:
            named = [table for table in tables if fnmatchcase(table, pattern)]
            if not named:
                raise ConfigError(
                    f"table_row_optimizers.{number}.tables: {pattern!r} fits no table; they are {', '.join(tables)}"
                )
            deciding |= dict.fromkeys(named, number)
    for number in set(range(len(entries))).difference(deciding.values()):
        raise ConfigError(
            f"table_row_optimizers.{number} has no effect: later entries decide all its tables; put it after them"
        )
    return {
        table: default if number is None else entries[number].row_optimizer
        for table, number in deciding.items()
    }
