"""Bias correction of exponential moving averages that start at zero, and the updates it counts.

Source: Kingma and Ba, "Adam", ICLR 2015, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def bias_correction(beta: float, updates: torch.Tensor) -> torch.Tensor:
    """1 - beta^t, float32, of ``updates`` t (any integer dtype and shape); t = 0 counts as t = 1.

    An average never updated is zero, and stays zero when divided by the correction of t = 1.
    In float64, where 1 - 0.999^t keeps its digits at small t.
    """
    return (1.0 - beta ** updates.clamp(min=1).double()).float()


class TableUpdates:
    """How often each table of a group was updated: ``count`` [T] int64.

    Every call of a rule's ``update`` counts, also one that touches no row of a table here:
    the row may have been another rank's, and all ranks must agree on t.
    """

    def __init__(self, row_starts: Sequence[int], device: torch.device) -> None:
        self.row_starts = torch.tensor(row_starts, dtype=torch.int64, device=device)
        self.count = torch.zeros(len(row_starts), dtype=torch.int64, device=device)

    def advance(self, rows: torch.Tensor) -> torch.Tensor:
        """Count one more update of every table; t [U] int64 of each of ``rows``."""
        self.count += 1
        return self.of_rows(rows)

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """t [U] int64 of the table of each of ``rows`` [U] int64."""
        tables = torch.searchsorted(self.row_starts, rows, right=True) - 1
        return self.count.index_select(0, tables)
