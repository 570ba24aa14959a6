"""A training config small enough for a test: a few dozen steps of a small DLRM on one thread."""

from __future__ import annotations

from pathlib import Path

from recsys_basis.config import compose_job
from recsys_basis.schema import parse_section
from recsys_basis.training.spec import TrainConfig


def tiny_config(prepared: Path, output_dir: Path, *overrides: str) -> TrainConfig:
    """Config of a run on the fixture ``prepared``, 25 steps an epoch, with ``overrides`` last."""
    settings = [
        f"dataset.prepared_dir={prepared}",
        "dataset.row_group_rows=500",
        f"output_dir={output_dir}",
        "batch_size=128",
        "embedding.embedding_dim=8",
        "embedding.min_rows_per_partition=16",
        "model.dense_arch=[16,8]",
        "model.over_arch=[16,1]",
        "log_every_steps=5",
        "shuffle_window=3",
        "runtime.device=cpu",
        "runtime.threads_per_rank=1",
        "runtime.collective_timeout_s=60",
    ]
    return parse_section(TrainConfig, compose_job("train", [*settings, *overrides]))
