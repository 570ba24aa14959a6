"""One norm over towers and rows, against torch's clipping of a dense copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.tiny import tiny_config

from recsys_basis.batches.parquet import list_row_groups
from recsys_basis.batches.stream import BatchStream
from recsys_basis.errors import NonFiniteError
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.training.build import build
from recsys_basis.training.clipping import clip_gradients
from recsys_basis.training.runtime import start_runtime


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_is_an_error_and_changes_nothing(
    value: float, prepared: Path, tmp_path: Path
) -> None:
    with start_runtime(tiny_config(prepared, tmp_path).runtime):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([1.0, value])
        with pytest.raises(NonFiniteError, match="norm of all gradients"):
            clip_gradients([parameter], [], 1.0)
        assert parameter.grad[0] == 1.0


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_is_torch_s_over_the_whole_model(max_norm: float, prepared: Path, tmp_path: Path) -> None:
    config = tiny_config(prepared, tmp_path, f"max_gradient_norm={max_norm}", "row_optimizer=sgd")
    with start_runtime(config.runtime) as runtime:
        trainable = build(config, Manifest.load(prepared), runtime)
        batch = next(iter(BatchStream(list_row_groups(sorted((prepared / "train").iterdir())), 64)))
        trainable.start_step(0, 10)
        logits = trainable.model(batch.dense, batch.sparse).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
        (bags,) = trainable.embedding_bags()
        assert bags.held is not None
        copies = [bags.held.sums.double()] + [each.grad.double() for each in trainable.dense_parameters()]
        parameters = [torch.nn.Parameter(torch.zeros_like(copy)) for copy in copies]
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.grad = copy
        expected_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)

        before = bags.weights.clone()
        norm = clip_gradients(trainable.dense_parameters(), [bags], max_norm)
        assert norm == pytest.approx(float(expected_norm), rel=1e-6)
        torch.testing.assert_close(bags.held.sums.double(), parameters[0].grad, rtol=1e-5, atol=1e-12)
        for ours, reference in zip(trainable.dense_parameters(), parameters[1:], strict=True):
            torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=1e-5, atol=1e-12)

        rows, gradients = bags.held.rows, bags.held.sums
        trainable.finish_step()
        change = before[rows] - bags.weights[rows]
        torch.testing.assert_close(change, gradients * bags.learning_rate, rtol=1e-4, atol=1e-7)
        assert dist.get_world_size() == 1
