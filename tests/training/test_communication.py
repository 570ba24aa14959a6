"""Fewer bits between ranks: training goes on nearly as before, and only where bits were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import tiny_config
from torchrec.distributed.comm_ops import set_use_sync_collectives

from recsys_basis.batches.parquet import list_row_groups
from recsys_basis.batches.stream import BatchStream
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.schema import ConfigError
from recsys_basis.training import build as build_module
from recsys_basis.training.build import Trainable
from recsys_basis.training.communication import CommunicationConfig, embedding_codecs
from recsys_basis.training.runtime import RuntimeConfig, start_runtime

CASES = {
    "fp32": [],
    "table_wise fp16": ["communication.embeddings=fp16"],
    "row_wise": ["embedding.sharding=row_wise"],
    "row_wise fp16": ["embedding.sharding=row_wise", "communication.embeddings=fp16"],
    "towers fp16": ["communication.towers=fp16"],
    "towers powersgd": ["communication.towers=powersgd", "communication.powersgd_start_step=2"],
    "later powersgd": ["communication.towers=powersgd", "communication.powersgd_start_step=1000"],
}
STEPS = 6
LINEAR = ("row_optimizer=sgd", "dense_optimizer=sgd")
"""Rules whose steps are proportional to gradients, so that a wrong scale shows."""


def train_each(prepared: Path) -> dict[str, Any]:
    """For each case how far ``STEPS`` steps moved the weights that this rank holds."""
    results: dict[str, Any] = {}
    with start_runtime(RuntimeConfig(device="cpu", threads_per_rank=1, collective_timeout_s=60)) as runtime:
        # The collectives of NCCL, which know the codecs of backward; gloo has them for equal batches.
        set_use_sync_collectives(False)
        build_module.embedding_codecs = as_on_a_gpu
        for name, overrides in CASES.items():
            config = tiny_config(
                prepared, Path("unused"), *LINEAR, "embedding.sharding=table_wise", *overrides
            )
            trainable = build_module.build(config, Manifest.load(prepared), runtime)
            start = weights_of(trainable)
            groups = list_row_groups(sorted((prepared / "train").iterdir()))
            stream = iter(BatchStream(groups, 64, runtime.rank, runtime.world_size))
            for step in range(STEPS):
                batch = next(stream)
                trainable.start_step(step, STEPS)
                logits = trainable.model(batch.dense, batch.sparse).squeeze(1)
                torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
                trainable.finish_step()
            end = weights_of(trainable)
            results[name] = {part: end[part] - start[part] for part in end}
    return results


def as_on_a_gpu(config: CommunicationConfig, batch_size: int, device: torch.device) -> Any:
    return embedding_codecs(config, batch_size, torch.device("cuda"))


def weights_of(trainable: Trainable) -> dict[str, torch.Tensor]:
    return {
        "towers": torch.cat([weight.detach().reshape(-1) for weight in trainable.dense_parameters()]),
        "rows": torch.cat([bags.weights.reshape(-1) for bags in trainable.embedding_bags()]),
    }


@pytest.fixture(scope="module")
def results(prepared: Path) -> list[dict[str, Any]]:
    return run_ranks(2, train_each, prepared)


@pytest.mark.parametrize(
    ("case", "exact", "most"),
    [
        ("table_wise fp16", "fp32", 0.01),
        ("row_wise fp16", "row_wise", 0.01),
        ("towers fp16", "fp32", 0.01),
        ("towers powersgd", "fp32", 0.5),  # matrices of rank 1
    ],
)
def test_training_differs_a_little(case: str, exact: str, most: float, results: list[dict[str, Any]]) -> None:
    for rank in results:
        for part in ("rows", "towers"):
            found, expected = rank[case][part], rank[exact][part]
            assert 0 < float((found - expected).norm() / expected.norm()) < most, part


@pytest.mark.parametrize("case", ["table_wise fp16", "row_wise fp16", "towers fp16", "towers powersgd"])
def test_ranks_keep_the_same_towers(case: str, results: list[dict[str, Any]]) -> None:
    assert torch.equal(results[0][case]["towers"], results[1][case]["towers"])


def test_powersgd_sends_whole_gradients_before_its_start(results: list[dict[str, Any]]) -> None:
    torch.testing.assert_close(results[0]["later powersgd"], results[0]["fp32"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fewer_bits_of_pooled_vectors_are_refused_on_a_cpu(precision: str, prepared: Path) -> None:
    config = tiny_config(prepared, Path("unused"), f"communication.embeddings={precision}")
    with pytest.raises(ConfigError, match=f"communication.embeddings = {precision}: needs GPUs"):
        embedding_codecs(config.communication, 64, torch.device("cpu"))


@pytest.mark.parametrize(("precision", "most"), [("fp16", 2**-11), ("bf16", 2**-8)])
@pytest.mark.parametrize("batch_size", [3, 256, 100_000])
def test_gradients_of_a_mean_over_a_large_batch_arrive(precision: str, most: float, batch_size: int) -> None:
    """Between 1e-3 and 10 for a row's own loss, so down to 1e-8 here; fp16 knows nothing below 6e-8."""
    settings = CommunicationConfig(
        embeddings=precision, towers="fp32", powersgd_rank=1, powersgd_start_step=2
    )
    gradient = torch.logspace(-3, 1, 1000, dtype=torch.float64).float() / batch_size
    for codecs in embedding_codecs(settings, batch_size, torch.device("cuda")).values():
        context = codecs.backward.create_context()
        found = codecs.backward.decode(codecs.backward.encode(gradient, context), context)
        assert found.dtype == torch.float32
        assert float(((found - gradient) / gradient).abs().max()) <= most
