"""What is wrong with the data, in words a user can act on."""

from __future__ import annotations

from pathlib import Path

from recsys_basis.errors import UserError


class DataError(UserError):
    """A raw file or a prepared folder cannot be used; the message names it and says why."""


class BadLine(DataError):
    """One line of a raw file that cannot be read.

    ``line`` counts physical lines of ``path`` from 1; ``column`` is None when the line as a
    whole is wrong; ``kind`` is one of ``lines.BAD_LINE_KINDS``.
    """

    def __init__(self, path: Path, line: int, column: str | None, kind: str, reason: str) -> None:
        self.path, self.line, self.column, self.kind, self.reason = path, line, column, kind, reason
        place = f"{path} line {line}" + (f", column {column}" if column else "")
        super().__init__(f"{place}: {reason}")
