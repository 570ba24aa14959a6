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
from recsys_basis.training.runtime import Runtime


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
    Raises RuntimeError if the evaluated rows are not exactly the stream's, OneClassError if they are
    all clicks or all not.
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
    if gathered is None:
        return None
    positions = np.concatenate([stream.positions(rank) for rank in range(runtime.world_size)])
    if len(positions) != len(gathered[0]) or len(positions) != stream.num_rows:
        raise RuntimeError(f"evaluated {len(gathered[0])} rows of a set of {stream.num_rows}")
    in_file_order = torch.from_numpy(np.argsort(positions))
    label, logit = (values[in_file_order] for values in gathered)
    num_bad = int((~torch.isfinite(logit)).sum())
    if num_bad:
        raise NonFiniteError(
            f"{num_bad} of {len(logit)} evaluated rows have no finite logit: training diverged"
        )
    return Evaluation(label, logit, click_metrics(label.numpy(), logit.numpy()))
