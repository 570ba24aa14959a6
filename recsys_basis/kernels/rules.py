"""Each row optimizer's state and settings, handed to its C++ rule.

State stays in the tensors that the row optimizer owns, so checkpoints see what the kernels write.
A new rule enters ``RULES`` by one function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recsys_basis.embeddings.features import InKernels
from recsys_basis.kernels.extension import load
from recsys_basis.row_optimizers import row_optimizer_class
from recsys_basis.row_optimizers.adafactor import Adafactor
from recsys_basis.row_optimizers.adagrad import Adagrad
from recsys_basis.row_optimizers.adam import Adam
from recsys_basis.row_optimizers.base import RowOptimizer, RowOptimizerConfig
from recsys_basis.row_optimizers.basis import Basis
from recsys_basis.row_optimizers.count_sketch_adam import CountSketchAdam
from recsys_basis.row_optimizers.partial_rowwise_adam import PartialRowwiseAdam
from recsys_basis.row_optimizers.rowwise_adagrad import RowwiseAdagrad
from recsys_basis.row_optimizers.sgd import SGD
from recsys_basis.row_optimizers.sm3 import SM3


def update(
    optimizer: RowOptimizer,
    weights: torch.Tensor,
    rows: torch.Tensor,
    gradients: torch.Tensor | InKernels,
    learning_rate: float,
) -> None:
    """What ``optimizer.update`` does, in C++ on torch's number of threads; the same bits for any number.

    weights float32: [U, D] of the touched rows, or [R, D] of the group, of which the touched rows change.
    Raises KeyError for a rule outside ``RULES``.
    """
    name, arguments = RULES[type(optimizer)]
    rule = getattr(load(), name)
    rule(
        weights,
        rows,
        optimizer.num_rows,
        gradients,
        learning_rate,
        optimizer.config.weight_decay,
        torch.get_num_threads(),
        **arguments(optimizer, rows),
    )


def _no_state(optimizer: Any, rows: torch.Tensor) -> dict[str, Any]:
    return {}


def _adagrad(optimizer: Adagrad | RowwiseAdagrad, rows: torch.Tensor) -> dict[str, Any]:
    return {"squares": optimizer.squares, "eps": optimizer.config.eps}


def _adam(optimizer: Adam | PartialRowwiseAdam, rows: torch.Tensor) -> dict[str, Any]:
    return {
        "first": optimizer.first,
        "second": optimizer.second,
        "updates": optimizer.updates.count,
        "row_starts": optimizer.updates.row_starts,
        "beta1": optimizer.config.beta1,
        "beta2": optimizer.config.beta2,
        "eps": optimizer.config.eps,
    }


def _sm3(optimizer: SM3, rows: torch.Tensor) -> dict[str, Any]:
    columns = optimizer.config.covers == "rows_and_columns"
    return {
        "row_maxima": optimizer.row_maxima,
        "column_maxima": optimizer.column_maxima if columns else None,
        "row_start": optimizer.partitions.row_start,
        "eps": optimizer.config.eps,
    }


def _adafactor(optimizer: Adafactor, rows: torch.Tensor) -> dict[str, Any]:
    counts = optimizer.config.beta2 is None
    return {
        "row_average": optimizer.row_average,
        "column_average": optimizer.column_average,
        "row_updates": optimizer.row_updates if counts else None,
        "column_updates": optimizer.column_updates if counts else None,
        "row_start": optimizer.partitions.row_start,
        "decay_power": optimizer.config.decay_power,
        "beta2": optimizer.config.beta2,
        "eps": optimizer.config.eps,
        "update_clip": optimizer.config.update_clip,
    }


def _count_sketch_adam(optimizer: CountSketchAdam, rows: torch.Tensor) -> dict[str, Any]:
    config, sketch = optimizer.config, optimizer.sketch
    return {
        "first": optimizer.first if config.beta1 > 0 else None,
        "second": optimizer.second,
        "updates": optimizer.updates.count,
        "table_starts": optimizer.updates.row_starts,
        "row_start": sketch.partitions.row_start,
        "bucket_start": sketch.start,
        "widths": sketch.width,
        "seeds": sketch.seeds.view(-1),
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps,
    }


def _basis(optimizer: Basis, rows: torch.Tensor) -> dict[str, Any]:
    config, buckets = optimizer.config, optimizer.buckets
    return {
        "config": vars(config),
        "first": optimizer.stored.get("first_moment"),
        "second": optimizer.stored["second_moment"],
        "updates": optimizer.updates,
        "row_scalar": optimizer.stored.get("scalar") or optimizer.stored.get("energy"),
        "row_counts": optimizer.row_counts.of_rows(rows) if config.needs_counts else None,
        "table_updates": optimizer.table_updates.count if config.corrects_energy else None,
        "table_starts": optimizer.table_updates.row_starts if config.corrects_energy else None,
        "row_start": buckets.row_start,
        "private_rows": buckets.private,
        "shared": buckets.shared,
        "shared_buckets": buckets.shared_buckets,
        "bucket_start": buckets.bucket_start,
        "private_start": buckets.private_start,
        "keys": buckets.keys.view(-1),
        "sign_seeds": buckets.sign_seeds,
    }


RULES: dict[type[RowOptimizer], tuple[str, Callable[[Any, torch.Tensor], dict[str, Any]]]] = {
    Basis: ("basis", _basis),
    Adam: ("adam", _adam),
    PartialRowwiseAdam: ("partial_rowwise_adam", _adam),
    RowwiseAdagrad: ("rowwise_adagrad", _adagrad),
    Adagrad: ("adagrad", _adagrad),
    SM3: ("sm3", _sm3),
    Adafactor: ("adafactor", _adafactor),
    CountSketchAdam: ("count_sketch_adam", _count_sketch_adam),
    SGD: ("sgd", _no_state),
}
"""Class of each rule that has a kernel, its name in C++, and what it takes beside rows [U] and gradients."""


def missing_rule(config: RowOptimizerConfig) -> str | None:
    """Why no kernel computes what ``config`` asks for; None if one does."""
    if row_optimizer_class(config.rule) not in RULES:
        return f"row_optimizer.rule = {config.rule!r} has no C++ kernel"
    return None
