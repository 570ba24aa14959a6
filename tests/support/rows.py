"""One step of a rule on some rows of a table of float32 weights."""

from __future__ import annotations

import torch

from recsys_basis.row_optimizers.base import RowOptimizer


def update_rows(
    optimizer: RowOptimizer,
    weights: torch.Tensor,
    rows: torch.Tensor,
    gradients: torch.Tensor,
    learning_rate: float,
) -> None:
    """Change ``weights`` [R, D] at ``rows`` [U], which must be distinct, as ``optimizer`` says."""
    touched = weights.index_select(0, rows)
    optimizer.update(touched, rows, gradients, learning_rate)
    weights.index_copy_(0, rows, touched)
