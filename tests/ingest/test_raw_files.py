from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_basis.ingest import raw_files
from recsys_basis.ingest.errors import DataError
from recsys_basis.ingest.raw_files import RawFile, size_of

TEXT = b"".join(b"%d\tabc\n" % number for number in range(5000))


def read(path: Path) -> bytes:
    return b"".join(RawFile(path, lambda num_bytes: None).blocks())


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_plain_and_gzip_files_give_the_same_lines(tmp_path):
    assert read(write(tmp_path / "a.tsv", TEXT)) == TEXT
    assert read(write(tmp_path / "a.tsv.gz", gzip.compress(TEXT))) == TEXT
    # Members joined end to end, as parallel compressors write them; and a name that does not tell.
    two_members = gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:])
    assert read(write(tmp_path / "b.tsv.gz", two_members)) == TEXT
    assert read(write(tmp_path / "c.tsv", gzip.compress(TEXT))) == TEXT


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.sampled_from([b"a", b"bc", b"\t", b"\n", b"\r\n"]), min_size=1).map(b"".join),
    block_bytes=st.integers(1, 9),
)
def test_blocks_are_whole_lines_whatever_their_size(tmp_path_factory, text, block_bytes):
    path = write(tmp_path_factory.mktemp("raw") / "a.tsv", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_files, "BLOCK_BYTES", block_bytes)
        blocks = list(RawFile(path, lambda num_bytes: None).blocks())
    assert all(block.endswith(b"\n") for block in blocks)
    assert b"".join(blocks) == text + (b"" if text.endswith(b"\n") else b"\n")


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_checksum_size_and_progress_are_of_the_file_on_disk(tmp_path, compress):
    data = compress(TEXT)
    path = write(tmp_path / "a.tsv", data)
    progress: list[int] = []
    file = RawFile(path, progress.append)
    assert b"".join(file.blocks()) == TEXT
    assert file.sha256 == hashlib.sha256(data).hexdigest()
    assert file.num_bytes == sum(progress) == len(data) == size_of(path)
    assert file.modified_ns == os.stat(path).st_mtime_ns


PACKED = gzip.compress(TEXT)


# A gzip header holds the time of writing, so the bytes must not name the case.
@pytest.mark.parametrize(
    "name, data, reason",
    [
        pytest.param("a.tsv", b"", "is empty", id="empty"),
        pytest.param("a.tsv.gz", b"", "is empty", id="no-header"),
        pytest.param("a.tsv.gz", gzip.compress(b""), "is empty", id="nothing-packed"),
        pytest.param("a.tsv.gz", PACKED[:-1], "truncated or damaged", id="last-byte-lost"),
        pytest.param("a.tsv.gz", PACKED[:100], "truncated or damaged", id="cut-in-data"),
        pytest.param("a.tsv.gz", PACKED[:5], "truncated or damaged", id="cut-in-header"),
        pytest.param("a.tsv.gz", PACKED[:-8] + b"\0" * 8, "truncated or damaged", id="wrong-checksum"),
        pytest.param(
            "a.tsv.gz",
            PACKED[:50] + b"\xff" * 20 + PACKED[70:],
            "truncated or damaged",
            id="overwritten",
        ),
        pytest.param("a.tsv.gz", PACKED + b"rest", "truncated or damaged", id="trailing-bytes"),
        pytest.param("a.tsv.gz", TEXT, "named .gz but is not a gzip file", id="not-packed"),
        pytest.param(
            "a.tsv",
            b"short\n" + b"x" * (3 << 20),
            "line 2 is longer than 1048576 bytes",
            id="long-line",
        ),
    ],
)
def test_unreadable_content_is_refused_by_name(tmp_path, name, data, reason):
    path = write(tmp_path / name, data)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("act", [read, size_of])
def test_missing_files_and_folders_are_refused_by_name(tmp_path, act):
    with pytest.raises(DataError, match=r"none\.tsv cannot be read: No such file"):
        act(tmp_path / "none.tsv")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        act(tmp_path)
