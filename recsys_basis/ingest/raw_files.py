"""Bytes of a raw file, plain or gzip, in blocks of whole lines and bounded memory."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from recsys_basis.ingest.errors import DataError

BLOCK_BYTES = 1 << 20
"""Uncompressed bytes read at a time: about 4,000 lines, which stay in the processor's cache."""
MAX_LINE_BYTES = 1 << 20
"""A longer line cannot be a click log (40 fields of at most 20 characters)."""
GZIP_MAGIC = b"\x1f\x8b"


class RawFile:
    """One raw file, read once from start to end.

    ``num_bytes``, ``sha256`` and ``modified_ns`` are those of the file as it lies on disk, complete
    once ``blocks`` is exhausted. ``on_read`` is called with the number of bytes of each read from disk.
    """

    def __init__(self, path: Path, on_read: Callable[[int], object]) -> None:
        self.path = path
        self.num_bytes = 0
        self.modified_ns = 0
        self._hash = hashlib.sha256()
        self._on_read = on_read

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def blocks(self) -> Iterator[bytes]:
        """Blocks of whole lines; every line ends with a newline, also the last.

        Raises DataError naming the file when it is missing, not a file, empty, a damaged or
        truncated gzip file, or has a line longer than MAX_LINE_BYTES.
        """
        try:
            with open(self.path, "rb") as file:
                self.modified_ns = os.fstat(file.fileno()).st_mtime_ns
                yield from self._split(self._decompressed(file))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{self.path} is truncated or damaged: {error}; fetch it again") from error
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def _decompressed(self, file: IO[bytes]) -> gzip.GzipFile | _Counted:
        is_gzip = file.read(2) == GZIP_MAGIC
        num_bytes = file.seek(0, io.SEEK_END)
        file.seek(0)
        if num_bytes and self.path.suffix == ".gz" and not is_gzip:
            raise DataError(f"{self.path} is named .gz but is not a gzip file")
        counted = _Counted(file, self._count)
        return gzip.GzipFile(fileobj=counted) if is_gzip else counted

    def _count(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._hash.update(data)
        self._on_read(len(data))

    def _split(self, stream: gzip.GzipFile | _Counted) -> Iterator[bytes]:
        rest, lines = b"", 0
        while chunk := stream.read(BLOCK_BYTES):
            end = chunk.rfind(b"\n") + 1
            if end:
                block = rest + chunk[:end]
                lines += block.count(b"\n")
                yield block
                rest = chunk[end:]
            else:
                rest += chunk
            if len(rest) > MAX_LINE_BYTES:
                raise DataError(
                    f"{self.path} line {lines + 1} is longer than {MAX_LINE_BYTES} bytes: not a click log"
                )
        if rest:
            yield rest + b"\n"
        elif not lines:
            raise DataError(f"{self.path} is empty")


def size_of(path: Path) -> int:
    """Bytes of a file on disk. Raises DataError naming it when it is missing or a folder."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}")


class _Counted(io.RawIOBase):
    """Passes on what ``file`` reads, and shows each piece to ``on_data``."""

    def __init__(self, file: IO[bytes], on_data: Callable[[bytes], None]) -> None:
        self._file, self._on_data = file, on_data

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._on_data(data)
        return data
