from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_basis.ingest.columns import DENSE_COLUMNS, RAW_COLUMNS, STAGED_SCHEMA
from recsys_basis.ingest.lines import BAD_LINE_KINDS, looks_unlabelled, parse_block

INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)


def test_a_good_line_becomes_numbers_and_nulls(raw_line):
    line = raw_line(label=b"1", I1=b"", I2=b"-2", I3=b"123456789012", C1=b"", C2=b"0a", C26=b"FFffFFff")
    parsed = parse_block(line)
    assert parsed.rows.schema == STAGED_SCHEMA
    (row,) = parsed.rows.to_pylist()
    assert (row["label"], row["I1"], row["I2"], row["I3"], row["I4"]) == (1, None, -2, 123456789012, 7)
    assert (row["C1"], row["C2"], row["C3"], row["C26"]) == (None, 10, 7, 0xFFFFFFFF)
    assert (parsed.num_lines, parsed.num_padded, parsed.problems) == (1, 0, ())


@pytest.mark.parametrize(
    "text, value",
    [
        *(
            (str(value).encode(), value)
            for value in (INT64_MAX, INT64_MIN, 0, -1, 99999999, 100000000, -99999999)
        ),
        (b"-0", 0),
        (b"007", 7),
        (b"-12345678", -12345678),
        (b"0000000000000000012", 12),
    ],
)
def test_integers(raw_line, text, value):
    assert parse_block(raw_line(I13=text)).rows["I13"].to_pylist() == [value]


@pytest.mark.parametrize("text", [b"0", b"00000000", b"f", b"abcdef0", b"12345678", b"AbCdEf01"])
def test_ids(raw_line, text):
    assert parse_block(raw_line(C1=text)).rows["C1"].to_pylist() == [int(text, 16)]


@pytest.mark.parametrize(
    "column, text, kind, reason",
    [
        ("label", b"2", "bad_label", "'2' is not 0 or 1"),
        ("label", b"", "bad_label", "'' is not 0 or 1"),
        ("label", b"01", "bad_label", "'01' is not 0 or 1"),
        ("label", b"-", "bad_label", "'-' is not 0 or 1"),
        ("I1", b"4x", "bad_integer", "'4x' is not an integer"),
        ("I3", b"1.0", "bad_integer", "'1.0' is not an integer"),
        ("I3", b"-", "bad_integer", "'-' is not an integer"),
        ("I3", b"--4", "bad_integer", "'--4' is not an integer"),
        ("I3", b"+4", "bad_integer", "'+4' is not an integer"),
        ("I3", b" 4", "bad_integer", "' 4' is not an integer"),
        ("I3", b"4 ", "bad_integer", "'4 ' is not an integer"),
        ("I3", b"0x12", "bad_integer", "'0x12' is not an integer"),
        ("I3", b"12-4", "bad_integer", "'12-4' is not an integer"),
        ("I3", b"1_0", "bad_integer", "'1_0' is not an integer"),
        ("I3", b"12345678901a", "bad_integer", "'12345678901a' is not an integer"),
        ("I3", b"a12345678901", "bad_integer", "'a12345678901' is not an integer"),
        ("I13", b"9223372036854775808", "bad_integer", "'9223372036854775808' is beyond 64-bit integers"),
        ("I13", b"-9223372036854775809", "bad_integer", "'-9223372036854775809' is beyond 64-bit integers"),
        ("I13", b"9" * 50, "bad_integer", f"'{'9' * 40}'... is beyond 64-bit integers"),
        ("I13", b"9" * 5000, "bad_integer", "is beyond 64-bit integers"),
        ("I2", b"\xff\x00", "bad_integer", r"'\xff\x00' is not an integer"),
        ("I2", "٣".encode(), "bad_integer", "is not an integer"),
        ("I2", b"4\r", "bad_integer", r"'4\r' is not an integer"),
        ("C1", b"xyz", "bad_id", "'xyz' is not an id of 1 to 8 hex digits"),
        ("C9", b"123456789", "bad_id", "'123456789' is not an id of 1 to 8 hex digits"),
        ("C9", b"0x1234", "bad_id", "'0x1234' is not an id"),
        ("C9", b"-1", "bad_id", "'-1' is not an id"),
        ("C9", b"abcdefg1", "bad_id", "'abcdefg1' is not an id"),
        ("C26", b" 12", "bad_id", "' 12' is not an id"),
        ("C26", b"\xc3\xa9", "bad_id", r"'\xc3\xa9' is not an id"),
    ],
)
def test_a_bad_field_is_named(raw_line, column, text, kind, reason):
    parsed = parse_block(raw_line() + raw_line(**{column: text}) + raw_line())
    assert parsed.rows.num_rows == 2
    (problem,) = parsed.problems
    assert (problem.kind, problem.count, problem.index, problem.column) == (kind, 1, 1, column)
    assert reason in problem.reason


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"\n", "1 column instead of 40 (on_bad_line=pad"),
        (b"0\t1\n", "2 columns instead of 40 (on_bad_line=pad"),
        (b"\t" * 38 + b"\n", "39 columns instead of 40 (on_bad_line=pad"),
        (b"0" + b"\t" * 40 + b"\n", "41 columns instead of 40"),
    ],
)
def test_a_wrong_column_count_is_named(raw_line, line, reason):
    (problem,) = parse_block(raw_line() + raw_line() + line + raw_line()).problems
    assert (problem.kind, problem.count, problem.index, problem.column) == ("wrong_column_count", 1, 2, None)
    assert problem.reason.startswith(reason)


def test_a_too_long_line_is_not_told_to_pad(raw_line):
    (problem,) = parse_block(raw_line()[:-1] + b"\t\n").problems
    assert "pad" not in problem.reason


def test_each_line_is_counted_once_by_its_leftmost_fault(raw_line):
    block = (
        raw_line(I3=b"x", C4=b"x")
        + raw_line(label=b"x", I3=b"x")
        + raw_line(C4=b"x")
        + raw_line(I5=b"x")
        + b"x\tx\n"
    )
    parsed = parse_block(block)
    found = {problem.kind: (problem.count, problem.index, problem.column) for problem in parsed.problems}
    assert found == {
        "bad_integer": (2, 0, "I3"),
        "bad_label": (1, 1, "label"),
        "bad_id": (1, 2, "C4"),
        "wrong_column_count": (1, 4, None),
    }
    assert parsed.rows.num_rows == 0
    assert parsed.num_lines == 5


def test_pad_gives_back_trailing_fields_and_nothing_else(raw_line):
    whole = raw_line(C25=b"", C26=b"")
    short = whole.rstrip(b"\t\n") + b"\n"
    parsed = parse_block(raw_line() + short + whole, pad=True)
    assert parsed.rows.equals(parse_block(raw_line() + whole + whole).rows)
    assert (parsed.num_padded, parsed.problems) == (1, ())

    faulty = parse_block(short.replace(b"7", b"x", 1) + b"\n" + raw_line()[:-1] + b"\t\n", pad=True)
    kinds = {problem.kind: problem.index for problem in faulty.problems}
    assert kinds == {"bad_integer": 0, "bad_label": 1, "wrong_column_count": 2}
    assert faulty.num_padded == 2


def test_carriage_returns_before_newlines_are_no_part_of_a_line(raw_line):
    lines = raw_line(C26=b"ab") + raw_line(C26=b"") + raw_line()
    assert parse_block(lines.replace(b"\n", b"\r\n")).rows.equals(parse_block(lines).rows)


def expected(line: bytes) -> tuple[str, int] | list[int | None]:
    """The first fault of a line by the rules as documented, or its values: one field at a time."""
    fields = line.split(b"\t")
    if len(fields) != 40:
        return "wrong_column_count", -1
    values: list[int | None] = []
    for place, field in enumerate(fields):
        if place == 0:
            if field not in (b"0", b"1"):
                return "bad_label", 0
            values.append(int(field))
        elif not field:
            values.append(None)
        elif place <= 13:
            if not re.fullmatch(rb"-?[0-9]{1,19}", field) or not INT64_MIN <= int(field) <= INT64_MAX:
                return "bad_integer", place
            values.append(int(field))
        else:
            if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", field):
                return "bad_id", place
            values.append(int(field, 16))
    return values


no_separator = st.binary(max_size=12).map(lambda field: re.sub(rb"[\t\n\r]", b"", field))
integer_field = st.one_of(
    st.just(b""),
    st.integers(-(10**9), 10**9).map(lambda value: b"%d" % value),
    st.integers(INT64_MIN - 5, INT64_MAX + 5).map(lambda value: b"%d" % value),
)
id_field = st.one_of(
    st.just(b""),
    st.integers(0, 2**32 - 1).flatmap(
        lambda value: st.sampled_from([b"%x" % value, b"%08x" % value, b"%X" % value])
    ),
)
rarely = st.integers(0, 59).map(lambda number: number == 0)


@st.composite
def mostly_good_lines(draw):
    fields = [draw(st.sampled_from([b"0", b"1"]))]
    fields += [draw(integer_field) for _ in DENSE_COLUMNS]
    fields += [draw(id_field) for _ in range(26)]
    for place in range(40):
        if draw(rarely):
            fields[place] = draw(no_separator)
    if draw(st.integers(0, 9)) == 0:
        fields = fields[: draw(st.integers(1, 40))]
    return b"\t".join(fields)


@settings(max_examples=60, deadline=None)
@given(st.lists(mostly_good_lines(), min_size=1, max_size=6), st.sampled_from([b"\n", b"\r\n"]))
def test_every_line_is_read_as_one_field_at_a_time_would_be(lines, newline):
    parsed = parse_block(b"".join(line + newline for line in lines))
    results = [expected(line) for line in lines]
    good = [result for result in results if isinstance(result, list)]
    assert [list(row.values()) for row in parsed.rows.to_pylist()] == good
    bad = [(index, *result) for index, result in enumerate(results) if isinstance(result, tuple)]
    assert {problem.kind: problem.count for problem in parsed.problems} == Counter(kind for _, kind, _ in bad)
    for problem in parsed.problems:
        index, kind, place = next(entry for entry in bad if entry[1] == problem.kind)
        assert problem.index == index
        assert problem.column == (None if kind == "wrong_column_count" else RAW_COLUMNS[place])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from([b"\t", b"\t" * 39, b"1", b"\r", b"\n"])),
        max_size=12,
    ),
    st.booleans(),
)
def test_no_bytes_crash_the_parser_and_every_line_is_accounted_for(parts, pad):
    block = b"".join(parts) + b"\n"
    parsed = parse_block(block, pad)
    assert parsed.num_lines == block.count(b"\n")
    assert parsed.rows.num_rows + sum(problem.count for problem in parsed.problems) == parsed.num_lines
    assert all(problem.kind in BAD_LINE_KINDS and problem.reason for problem in parsed.problems)
    assert looks_unlabelled(block) in (True, False)


def without_label(line: bytes) -> bytes:
    return line.split(b"\t", 1)[1]


def stripped_of_last_column(line: bytes) -> bytes:
    return line.rsplit(b"\t", 1)[0] + b"\n"


def test_unlabelled_files_are_told_by_their_shape(raw_line):
    # 8-digit ids cannot be read as I13, and a count cannot be read as a label.
    labelled = raw_line(I1=b"3", C1=b"68fd1e64", C26=b"")
    assert looks_unlabelled(without_label(labelled))
    assert looks_unlabelled(without_label(labelled) * 300 + labelled * 200)
    assert not looks_unlabelled(without_label(labelled) * 200 + labelled * 300)
    assert not looks_unlabelled(labelled * 3)
    assert not looks_unlabelled(stripped_of_last_column(labelled) * 3)
    assert not looks_unlabelled(labelled.rstrip(b"\t\n") + b"\n")
    assert not looks_unlabelled(b"\n\n")
    # Either column alone tells it.
    assert looks_unlabelled(without_label(raw_line(I1=b"0", C1=b"68fd1e64")))
    assert looks_unlabelled(without_label(raw_line(I1=b"3", C1=b"77")))


@pytest.mark.parametrize(
    "name, unlabelled",
    [
        ("kaggle_unlabelled_1k.tsv", True),
        ("kaggle_short_lines_1k.tsv", False),
    ],
)
def test_real_files_with_few_columns(real_data: Path, name: str, unlabelled: bool):
    text = (real_data / "criteo" / name).read_bytes()
    assert looks_unlabelled(text.rstrip(b"\n") + b"\n") == unlabelled
    lines = text.splitlines(keepends=True)
    assert all(looks_unlabelled(b"".join(lines[k : k + 50])) == unlabelled for k in range(0, len(lines), 50))
