"""A config value for single tables, by name or glob, where they do not take the common one.

table_row_optimizers: {C3: adam, "C1?": sgd}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from recsys_basis.schema import ConfigError

Value = TypeVar("Value")


def choose_by_table(
    common: Value, patterns: Mapping[str, Value], tables: Sequence[str], where: str
) -> dict[str, Value]:
    """The value of each of ``tables``: its name's, else the first fitting glob's, else ``common``.

    Raises ConfigError, naming the key ``where``, for a name or glob that decides no table.
    """
    deciding = {}
    for table in tables:
        fitting = [pattern for pattern in patterns if fnmatchcase(table, pattern)]
        if fitting:
            deciding[table] = table if table in fitting else fitting[0]
    for pattern in patterns:
        if not any(fnmatchcase(table, pattern) for table in tables):
            raise ConfigError(f"{where}.{pattern} names no table; they are {', '.join(tables)}")
        if pattern not in deciding.values():
            raise ConfigError(
                f"{where}.{pattern} decides nothing: names and earlier globs have all its tables"
            )
    return {table: patterns[deciding[table]] if table in deciding else common for table in tables}
