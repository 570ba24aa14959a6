"""Which table takes which value; a name that fits nothing is refused with the names that would."""

from __future__ import annotations

import pytest

from recsys_basis.by_table import choose_by_table
from recsys_basis.schema import ConfigError

TABLES = ("C1", "C2", "C10", "C11")


def chosen(patterns: dict[str, str]) -> str:
    result = choose_by_table("-", patterns, TABLES, "key")
    assert tuple(result) == TABLES
    return "".join(result.values())


def test_a_name_counts_before_a_glob_then_the_first_glob_that_fits() -> None:
    assert chosen({}) == "----"
    assert chosen({"C1": "a"}) == "a---"
    assert chosen({"C1?": "a"}) == "--aa"
    assert chosen({"C1?": "a", "C11": "b"}) == chosen({"C11": "b", "C1?": "a"}) == "--ab"
    assert chosen({"C1?": "a", "C*": "b"}) == "bbaa"
    assert chosen({"C[12]": "a", "*0": "b"}) == "aab-"


@pytest.mark.parametrize("pattern", ["C3", "D*", "c1", ""])
def test_a_name_or_glob_that_fits_nothing_is_refused_with_the_tables(pattern: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        chosen({"C1": "a", pattern: "b"})
    assert str(refusal.value) == f"key.{pattern} names no table; they are C1, C2, C10, C11"


def test_a_glob_that_decides_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"key\.C1\? decides nothing"):
        chosen({"C*": "a", "C1?": "b"})
    with pytest.raises(ConfigError, match=r"key\.C1\? decides nothing"):
        chosen({"C10": "a", "C11": "b", "C1?": "c"})
