"""A block of raw lines to typed columns, or which line is bad and why.

All fields of a block are decoded together, on numpy arrays. A field ends at a tab or a newline;
its last 8 characters are one 8-byte window, looked up as 4 pairs of digits. That covers every id
and nearly every integer; longer integers are read one by one.

n is the number of lines of a block, c the number of columns decoded together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from recsys_basis.ingest.columns import DENSE_COLUMNS, RAW_COLUMNS, SPARSE_COLUMNS, STAGED_SCHEMA

BAD_LINE_KINDS = ("wrong_column_count", "bad_label", "bad_integer", "bad_id")
NUM_FIELDS = len(RAW_COLUMNS)
FIRST_SPARSE = 1 + len(DENSE_COLUMNS)
WINDOW = 8
"""Characters of a field that are decoded at once."""
SHOWN_BYTES = 40
"""Of a bad field, in a message."""
PROBED_LINES = 1000
"""Lines by which a file without labels is recognized."""


@dataclass(frozen=True)
class Problem:
    """The lines of a block that are bad in one way: how many, and the first of them.

    ``index`` counts lines of the block from 0; ``column`` is None when the line as a whole is wrong.
    """

    kind: str
    count: int
    index: int
    column: str | None
    reason: str


@dataclass(frozen=True)
class ParsedBlock:
    """The good lines of a block as STAGED_SCHEMA, in order, and one Problem for each kind of bad line."""

    rows: pa.RecordBatch
    num_lines: int
    num_padded: int
    problems: tuple[Problem, ...]


def parse_block(block: bytes, pad: bool = False) -> ParsedBlock:
    r"""Parse whole lines, each ending in \n or \r\n.

    pad: lines with fewer than 40 fields get trailing empty ones, and are counted as padded.
    A bad line is counted once: a wrong number of fields comes before all, then the leftmost fault.
    """
    text = block.replace(b"\r\n", b"\n") if b"\r" in block else block
    fields, num_fields = _split_fields(text)
    is_wrong = num_fields != NUM_FIELDS
    num_padded = 0
    if is_wrong.any():
        is_padded = (num_fields < NUM_FIELDS) & pad
        is_wrong &= ~is_padded
        num_padded = int(is_padded.sum())
        fields, _ = _split_fields(_with_all_fields(text, num_fields, is_wrong))
    fields = fields.by_column(len(num_fields))

    is_bad = np.empty(fields.ends.shape, dtype=bool)
    labels, is_bad[:1] = _labels(fields[:1])
    integers, is_bad[1:FIRST_SPARSE] = _integers(fields[1:FIRST_SPARSE])
    ids, is_bad[FIRST_SPARSE:] = _ids(fields[FIRST_SPARSE:])
    is_missing = fields.lengths[1:] == 0
    is_bad[1:] &= ~is_missing
    columns = [
        pa.array(values, mask=mask) for values, mask in zip((*integers, *ids), is_missing, strict=True)
    ]
    rows = pa.RecordBatch.from_arrays([pa.array(labels[0]), *columns], schema=STAGED_SCHEMA)

    is_good = ~(is_wrong | is_bad.any(axis=0))
    problems: tuple[Problem, ...] = ()
    if not is_good.all():
        problems = _describe(fields, num_fields, is_wrong, is_bad)
        rows = rows.filter(pa.array(is_good))
    return ParsedBlock(rows, len(num_fields), num_padded, problems)


def looks_unlabelled(block: bytes) -> bool:
    """Whether ``block``, the start of a file, has no label column.

    It has none when, among its first 1,000 lines, 39 is the commonest number of fields, and more
    of those lines fit I1..I13, C1..C26 than fit a labelled line that was stripped of an empty C26.
    """
    lines = block.replace(b"\r\n", b"\n").split(b"\n", PROBED_LINES)[:PROBED_LINES]
    lines = [line for line in lines if line]
    short = [line for line in lines if line.count(b"\t") == NUM_FIELDS - 2]
    counts = [line.count(b"\t") for line in lines]
    if not short or max(counts, key=counts.count) != NUM_FIELDS - 2:
        return False
    as_unlabelled = parse_block(b"".join(b"0\t" + line + b"\n" for line in short))
    as_stripped = parse_block(b"".join(line + b"\t\n" for line in short))
    return as_unlabelled.rows.num_rows > as_stripped.rows.num_rows


@dataclass(frozen=True)
class _Fields:
    """Fields of a text: field i is text[ends[i] - lengths[i] : ends[i]]."""

    text: bytes
    ends: np.ndarray
    lengths: np.ndarray

    def by_column(self, num_lines: int) -> _Fields:
        """The same fields, arranged as [40, n]."""
        shape = (num_lines, NUM_FIELDS)
        return _Fields(
            self.text,
            np.ascontiguousarray(self.ends.reshape(shape).T),
            np.ascontiguousarray(self.lengths.reshape(shape).T),
        )

    def __getitem__(self, columns: slice) -> _Fields:
        return _Fields(self.text, self.ends[columns], self.lengths[columns])

    def value(self, place: tuple[int, ...]) -> bytes:
        end, length = int(self.ends[place]), int(self.lengths[place])
        return self.text[end - length : end]

    def first_characters(self) -> np.ndarray:
        """uint8, the shape of ``ends``; of an empty field, the separator after it."""
        return np.frombuffer(self.text, dtype=np.uint8)[self.ends - self.lengths]


def _split_fields(text: bytes) -> tuple[_Fields, np.ndarray]:
    """All fields of ``text`` in order, and the number of fields of each line: int64 [n]."""
    characters = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero((characters == ord("\t")) | (characters == ord("\n")))
    last_of_line = np.flatnonzero(characters[ends] == ord("\n"))
    lengths = np.diff(ends, prepend=-1) - 1
    return _Fields(text, ends, lengths), np.diff(last_of_line, prepend=-1)


def _with_all_fields(text: bytes, num_fields: np.ndarray, is_wrong: np.ndarray) -> bytes:
    """``text`` with 40 fields in every line: wrong lines become empty fields, short ones are padded."""
    lines = text.split(b"\n")
    for index in np.flatnonzero(num_fields != NUM_FIELDS):
        kept = b"" if is_wrong[index] else lines[index]
        lines[index] = kept + b"\t" * (NUM_FIELDS - 1 - kept.count(b"\t"))
    return b"\n".join(lines)


def _pair_table(digits: bytes) -> np.ndarray:
    """int16 [65536]: the number that two characters stand for, -1 where one is no digit.

    The index is the pair as a little-endian number: the first character is its low byte.
    """
    digit = np.full(256, -1, dtype=np.int16)
    digit[np.frombuffer(digits, dtype=np.uint8)] = np.arange(len(digits))
    digit[np.frombuffer(digits.upper(), dtype=np.uint8)] = np.arange(len(digits))
    first, second = digit[None, :], digit[:, None]
    return np.where((first < 0) | (second < 0), -1, len(digits) * first + second).astype(np.int16).reshape(-1)


DECIMAL_PAIRS = _pair_table(b"0123456789")
HEX_PAIRS = _pair_table(b"0123456789abcdef")

KEPT_BYTES = np.array([(2**64 - 1) & ~((1 << 8 * (WINDOW - n)) - 1) for n in range(WINDOW + 1)], dtype="<u8")
"""For a field of n characters: the bytes of its window that belong to it."""
LEADING_ZEROS = np.frombuffer(b"0" * WINDOW, dtype="<u8") & ~KEPT_BYTES
"""For a field of n characters: the digit 0 in all other bytes."""


def _decode(
    text: bytes, ends: np.ndarray, num_digits: np.ndarray, pair_table: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (int64) in the ``num_digits`` <= 8 characters before ``ends``, and where there are none."""
    padded = b"\0" * WINDOW + text
    windows = np.ndarray(len(text) + 1, dtype="<u8", buffer=padded, strides=(1,))
    digits = windows[ends] & KEPT_BYTES[num_digits] | LEADING_ZEROS[num_digits]
    pairs = digits.view("<u2").reshape(*digits.shape, WINDOW // 2)
    base = int(pair_table.max()) + 1
    value = np.zeros(digits.shape, dtype=np.int64)
    is_bad = np.zeros(digits.shape, dtype=bool)
    for place in range(WINDOW // 2):
        number = pair_table[pairs[..., place]]
        value *= base
        value += number
        is_bad |= number < 0
    return value, is_bad


def _labels(fields: _Fields) -> tuple[np.ndarray, np.ndarray]:
    """int8 [1, n] and where they are bad."""
    characters = fields.first_characters()
    is_bad = (fields.lengths != 1) | ((characters != ord("0")) & (characters != ord("1")))
    return (characters == ord("1")).astype(np.int8), is_bad


def _ids(fields: _Fields) -> tuple[np.ndarray, np.ndarray]:
    """uint32 [c, n] of 1 to 8 hex digits, and where they are bad."""
    values, is_bad = _decode(fields.text, fields.ends, np.minimum(fields.lengths, WINDOW), HEX_PAIRS)
    return values.astype(np.uint32), is_bad | (fields.lengths > WINDOW)


def _integers(fields: _Fields) -> tuple[np.ndarray, np.ndarray]:
    """int64 [c, n] and where they are bad."""
    is_negative = fields.first_characters() == ord("-")
    num_digits = fields.lengths - is_negative
    values, is_bad = _decode(fields.text, fields.ends, np.clip(num_digits, 0, WINDOW), DECIMAL_PAIRS)
    values[is_negative] *= -1
    is_bad |= num_digits == 0
    for place in zip(*np.nonzero(num_digits > WINDOW), strict=True):
        value = _long_integer(fields.value(place))
        is_bad[place] = value is None
        values[place] = value or 0
    return values, is_bad


def _long_integer(text: bytes) -> int | None:
    if not re.fullmatch(rb"-?[0-9]{1,19}", text):
        return None
    value = int(text)
    return value if -(2**63) <= value < 2**63 else None


def _describe(
    fields: _Fields, num_fields: np.ndarray, is_wrong: np.ndarray, is_bad: np.ndarray
) -> tuple[Problem, ...]:
    kind_of_field = np.array([1] + [2] * len(DENSE_COLUMNS) + [3] * len(SPARSE_COLUMNS))
    leftmost = is_bad.argmax(axis=0)
    kind_of_line = np.where(is_wrong, 0, kind_of_field[leftmost])
    problems = []
    for kind, name in enumerate(BAD_LINE_KINDS):
        lines = np.flatnonzero((is_wrong | is_bad.any(axis=0)) & (kind_of_line == kind))
        if len(lines) == 0:
            continue
        index = int(lines[0])
        if name == "wrong_column_count":
            column, reason = None, _explain_count(int(num_fields[index]))
        else:
            field = int(leftmost[index])
            column, reason = RAW_COLUMNS[field], _explain_field(name, fields.value((field, index)))
        problems.append(Problem(name, len(lines), index, column, reason))
    return tuple(problems)


def _explain_count(num_fields: int) -> str:
    if num_fields < NUM_FIELDS:
        hint = " (on_bad_line=pad restores trailing empty columns that were stripped)"
        return f"{num_fields} column{'s' * (num_fields > 1)} instead of {NUM_FIELDS}{hint}"
    return f"{num_fields} columns instead of {NUM_FIELDS}"


def _explain_field(kind: str, value: bytes) -> str:
    shown = repr(value[:SHOWN_BYTES])[1:] + ("..." if len(value) > SHOWN_BYTES else "")
    match kind:
        case "bad_label":
            return f"{shown} is not 0 or 1"
        case "bad_id":
            return f"{shown} is not an id of 1 to {WINDOW} hex digits"
    if re.fullmatch(rb"-?[0-9]+", value):
        return f"{shown} is beyond 64-bit integers"
    return f"{shown} is not an integer"
