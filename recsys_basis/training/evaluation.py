"""Logits of every evaluated row of all ranks, once each and in file order, and their metrics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from recsys_basis.batches.prefetch import prefetch
from recsys_basis.batches.stream import BatchStream
from recsys_basis.errors import NonFiniteError
from recsys_basis.metrics.click import ClickMetrics, click_metrics
from recsys_basis.metrics.gather import gather_rows
from recsys_basis.training.runtime import Runtime, on_main


@dataclass(frozen=True)
class Evaluation:
    """Labels [n] and logits [n] float32 of all rows, in file order, and their metrics."""

    label: torch.Tensor
    logit: torch.Tensor
    metrics: ClickMetrics


def evaluate(
    model: nn.Module,
    stream: BatchStream,
    prefetch_batches: int,
    runtime: Runtime,
    on_batch: Callable[[int], object],
) -> Evaluation | None:
    """Run ``model`` over ``stream`` without training; the main rank gets the result, others None.

    ``on_batch(rows)`` is called after each batch with its global rows, for progress.
    Raises RuntimeError if the evaluated rows are not exactly the stream's; on all ranks OneClassError if they
    are all clicks or all not, and NonFiniteError for logits that are not finite.
    """
    labels, logits = [torch.empty(0)], [torch.empty(0)]
    model.eval()
    with torch.no_grad(), closing(prefetch(stream, prefetch_batches)) as batches:
        for batch in batches:
            batch = batch.to(runtime.device)
            logits.append(model(batch.dense, batch.sparse).squeeze(1).float().cpu())
            labels.append(batch.label.cpu())
            on_batch(batch.global_rows)
    model.train()
    gathered = gather_rows(torch.cat(labels), torch.cat(logits))
    return on_main(lambda: judge(stream, runtime.world_size, *gathered) if gathered else None)


def judge(stream: BatchStream, world_size: int, label: torch.Tensor, logit: torch.Tensor) -> Evaluation:
    """Put label [n] and logit [n], one rank's after the other, into file order; raises as ``evaluate``."""
    positions = np.concatenate([stream.positions(rank) for rank in range(world_size)])
    if len(positions) != len(label) or len(positions) != stream.num_rows:
        raise RuntimeError(f"evaluated {len(label)} rows of a set of {stream.num_rows}")
    in_file_order = torch.from_numpy(np.argsort(positions))
    label, logit = label[in_file_order], logit[in_file_order]
    num_bad = int((~torch.isfinite(logit)).sum())
    if num_bad:
        raise NonFiniteError(
            f"{num_bad} of {len(logit)} evaluated rows have no finite logit: training diverged"
        )
    return Evaluation(label, logit, click_metrics(label.numpy(), logit.numpy()))
