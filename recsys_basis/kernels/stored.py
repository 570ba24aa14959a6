"""What ``Stored`` reads and writes, in C++ on torch's number of threads: the same bits."""

from __future__ import annotations

import torch

from recsys_basis.kernels.extension import load
from recsys_basis.row_optimizers.storage import Stored


def read(stored: Stored, keys: torch.Tensor) -> torch.Tensor:
    """As ``Stored.read``, of a tensor [n, D] on a CPU: float32 [U, D] at ``keys`` [U] int64."""
    values = torch.empty(len(keys), stored.tensor.shape[1])
    load().read_rows(stored, keys, values, torch.get_num_threads())
    return values


def write(stored: Stored, keys: torch.Tensor, values: torch.Tensor, updates: torch.Tensor) -> None:
    """As ``Stored.write``; ``updates`` [U] int64."""
    load().write_rows(stored, keys, values, updates, torch.get_num_threads())
