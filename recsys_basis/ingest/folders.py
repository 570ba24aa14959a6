"""Folders that appear whole or not at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recsys_basis.ingest.errors import DataError


@contextmanager
def whole_folder(target: Path, overwrite: bool, marker: str) -> Iterator[Path]:
    """Yield a new folder beside ``target``; it becomes ``target`` if the block succeeds, else it is removed.

    With ``overwrite`` an existing ``target`` is replaced, and stays as it is until then. Only a
    folder that holds the file ``marker`` is ever replaced, so that a wrong path deletes nothing.
    Raises DataError naming ``target`` when it exists and may not be replaced.
    """
    target = target.resolve()
    if target.exists():
        if not overwrite:
            raise DataError(f"{target} already exists: name another folder, or set overwrite=true")
        if not (target / marker).is_file():
            raise DataError(
                f"{target} holds no {marker}, so it is not replaced: remove it, or name another folder"
            )
    with scratch_folder(target) as scratch:
        new = scratch / "new"
        new.mkdir()
        yield new
        if target.exists():
            target.rename(scratch / "old")
        try:
            new.rename(target)
        except OSError:
            if (scratch / "old").exists():
                (scratch / "old").rename(target)
            raise


@contextmanager
def scratch_folder(neighbour: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside ``neighbour``; it is removed at the end, come what may."""
    path = neighbour.resolve().with_name(f".{neighbour.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{path.parent} cannot be written to: {error.strerror or error}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
