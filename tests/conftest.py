"""Fixtures shared by all tests, and the threads they run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real click logs (see README, "Real data"); tests that need it skip where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("RECSYS_BASIS_DATA", default))
    if not (folder / "criteo" / "kaggle_137k.tsv.gz").is_file():
        pytest.skip(f"no real click logs in {folder}: set RECSYS_BASIS_DATA to their folder")
    return folder
