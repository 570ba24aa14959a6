"""manifest.json: what a prepared folder holds, checksums of all of it, and how it was made."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from recsys_basis.ingest.errors import DataError
from recsys_basis.ingest.spec import DatasetConfig
from recsys_basis.schema import Section

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1


class Source(Section):
    """One raw file, as it lay on disk when it was read."""

    path: str
    num_bytes: int
    modified_ns: int
    """Time of its last change, nanoseconds since 1970."""
    sha256: str
    num_lines: int
    """Physical lines, bad ones included."""


class BadLines(Section):
    """Lines left out (on_bad_line=skip), by kind; those given back their trailing fields (pad)."""

    wrong_column_count: int
    bad_label: int
    bad_integer: int
    bad_id: int
    first: dict[str, str]
    """Of each kind that occurs: the first such line and what is wrong with it."""
    padded: int

    @property
    def num_skipped(self) -> int:
        return self.wrong_column_count + self.bad_label + self.bad_integer + self.bad_id


class DataFile(Section):
    """One written file; ``path`` is relative to the prepared folder."""

    path: str
    num_rows: int
    num_bytes: int
    sha256: str

    @classmethod
    def describe(cls, path: Path, folder: Path, num_rows: int) -> DataFile:
        """The record of ``path``, a file in ``folder``."""
        return cls(
            path=path.relative_to(folder).as_posix(),
            num_rows=num_rows,
            num_bytes=path.stat().st_size,
            sha256=sha256_of(path),
        )

    def verify(self, folder: Path | str) -> None:
        """Read the file again. Raises DataError naming it when it is missing or altered."""
        path = Path(folder) / self.path
        if not path.is_file():
            raise DataError(f"{path} is missing: prepare the data anew")
        if path.stat().st_size != self.num_bytes or sha256_of(path) != self.sha256:
            raise DataError(f"{path} is damaged: it is not the file that was written; prepare the data anew")


class Split(Section):
    """Rows of one part, in time order over ``files``; ``num_positives`` of them are clicks."""

    num_rows: int
    num_positives: int
    files: tuple[DataFile, ...]


class ColumnCounts(Section):
    """How often id 0 of a column occurs where its vocabulary was fitted: its two reasons."""

    num_missing: int
    num_rare: int


class VocabularyCounts(Section):
    """What the vocabulary was fitted on: a training part of ``num_rows`` rows, this one or an earlier one."""

    min_count: int
    num_rows: int
    columns: dict[str, ColumnCounts]


SplitName = Literal["train", "test"]


class Manifest(Section):
    """Everything known of a prepared folder but its rows."""

    format_version: Literal[1]
    columns: dict[str, str]
    """Columns of the Parquet files and their types, in order."""
    cardinalities: dict[str, int]
    """Ids of each categorical column, id 0 (missing or rare) included."""
    integer_shifts: dict[str, int]
    """Of each integer column x: it is stored as log1p(max(x + shift, 0))."""
    splits: dict[SplitName, Split]
    split_rule: str
    vocabulary: VocabularyCounts
    vocabulary_files: dict[str, DataFile]
    bad_lines: BadLines
    sources: tuple[Source, ...]
    config: DatasetConfig
    created_utc: str
    command: str
    versions: dict[str, str]

    @classmethod
    def load(cls, folder: Path | str) -> Manifest:
        """Read ``folder``/manifest.json.

        Raises DataError naming it when it is absent, damaged or of another version.
        """
        path = Path(folder) / MANIFEST_NAME
        try:
            text = path.read_text(encoding="utf-8")
            version = json.loads(text)["format_version"]
        except FileNotFoundError:
            raise DataError(
                f"{folder} is not a prepared data set (it has no {MANIFEST_NAME}): run `recsys-basis prepare`"
            ) from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path} is damaged ({error!r}): prepare the data anew") from error
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version!r}, this program reads {FORMAT_VERSION}: "
                "prepare the data anew"
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(str(part) for part in problem["loc"])
            raise DataError(f"{path} is damaged: {key}: {problem['msg']}; prepare the data anew") from None

    def save(self, folder: Path) -> None:
        """Write ``folder``/manifest.json."""
        (folder / MANIFEST_NAME).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def files(self) -> list[DataFile]:
        """Every file of the folder that the manifest answers for."""
        rows = [file for split in self.splits.values() for file in split.files]
        return rows + list(self.vocabulary_files.values())

    def digest(self) -> str:
        """Hex digest that tells these rows from any others: of the checksums of all their files."""
        sums = [file.sha256 for split in self.splits.values() for file in split.files]
        return hashlib.sha256(" ".join(sums).encode()).hexdigest()

    def verify(self, folder: Path | str) -> None:
        """Read every file again. Raises DataError naming the first that is missing or altered."""
        for file in self.files():
            file.verify(folder)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes, read in bounded memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
