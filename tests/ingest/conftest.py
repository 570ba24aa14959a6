from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recsys_basis.ingest.columns import RAW_COLUMNS
from recsys_basis.ingest.spec import DatasetConfig


@pytest.fixture(scope="session")
def raw_line() -> Callable[..., bytes]:
    """Makes a good line; keyword arguments replace fields: raw_line(I3=b"4x")."""

    def make(**fields: bytes) -> bytes:
        default = {name: b"7" for name in RAW_COLUMNS} | {"label": b"0"}
        assert fields.keys() <= default.keys()
        return b"\t".join((default | fields).values()) + b"\n"

    return make


@pytest.fixture
def config(tmp_path: Path) -> DatasetConfig:
    return DatasetConfig(
        format="criteo_kaggle",
        raw_paths=(str(tmp_path / "raw.tsv"),),
        prepared_dir=str(tmp_path / "prepared"),
        vocabulary_from=None,
        min_count=2,
        test_fraction=0.2,
        on_bad_line="error",
        overwrite=False,
        row_group_rows=65536,
    )
