"""Fixtures shared by all tests, and the threads they run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.kernels import require_kernels

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real click logs (see README, "Real data"); tests that need it skip where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("RECSYS_BASIS_DATA", default))
    if not (folder / "criteo" / "kaggle_137k.tsv.gz").is_file():
        pytest.skip(f"no real click logs in {folder}: set RECSYS_BASIS_DATA to their folder")
    return folder


@pytest.fixture
def kernels_on_any_threads() -> Iterator[None]:
    """Skip where the C++ kernels were not compiled; a test may set torch's number of threads."""
    require_kernels()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small prepared synthetic data set: 3,200 training rows in 7 row groups, 800 test rows."""
    from recsys_basis.config import compose_job
    from recsys_basis.ingest.spec import DatasetConfig, SyntheticConfig
    from recsys_basis.ingest.synthetic import synthesize
    from recsys_basis.prepare import prepare
    from recsys_basis.schema import parse_section

    folder = tmp_path_factory.mktemp("synthetic")
    overrides = [f"output_dir={folder}", "synthetic.rows=4000", "synthetic.cardinality_scale=0.001"]
    values = compose_job("synthesize", overrides)["synthetic"]
    synthesize(parse_section(SyntheticConfig, values))
    overrides = [
        f"dataset.raw_paths=[{folder}/clicks.tsv.gz]",
        f"output_dir={folder}/prepared",
        f"dataset.prepared_dir={folder}/prepared",
        "dataset.row_group_rows=500",
    ]
    prepare(parse_section(DatasetConfig, compose_job("prepare", overrides)["dataset"]))
    return folder / "prepared"
