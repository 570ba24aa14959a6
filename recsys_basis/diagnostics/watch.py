"""The one observer that embedding bags know: which rows a step touched, and their weights before it."""

from __future__ import annotations

import torch

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags


class Watch:
    """Attached to ``bags`` for one step; ``rows`` [U] int64 and ``before`` [U, D] float32 after backward."""

    def __init__(self, bags: RowOptimizedEmbeddingBags) -> None:
        self.bags = bags
        self.rows = torch.zeros(0, dtype=torch.int64, device=bags.weights.device)
        self.before = bags.stored.read(self.rows)
        bags.observer = self.see

    def see(self, rows: torch.Tensor) -> None:
        """Called with the distinct ``rows``, before they change."""
        self.rows, self.before = rows, self.bags.stored.read(rows)

    def end(self) -> None:
        """Let go of the bags."""
        self.bags.observer = None
