"""Sum vectors that share a key: duplicates of a row in a batch, rows of a bucket.

Both are one shape of work: L items, each with a key and a source vector, summed into one
vector per distinct key. The sum runs through ``embedding_bag``, whose CPU kernel is many
times faster than ``index_add_`` or ``segment_reduce`` and adds in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Segments:
    """L items grouped by key; U distinct keys.

    keys   [U] int64, ascending
    order  [L] int64, items sorted by key, first come first within a key
    counts [U] int64, items of each key
    """

    keys: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor) -> Segments:
        """Group items by ``keys`` [L] int64."""
        ordered, order = torch.sort(keys, stable=True)
        distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
        return cls(distinct, order, counts)

    def sum(
        self, source: torch.Tensor, index: torch.Tensor | None = None, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[U, D]: for each key, the sum over its items l of weight[l] * source[index[l]].

        source [S, D] float; index [L] int64 into source (default: item l is source row l);
        weight [L] of source's dtype (default 1).
        """
        if self.keys.numel() == 0:
            return source.new_zeros(0, source.shape[1])
        starts = self.counts.cumsum(0) - self.counts
        return F.embedding_bag(
            self.order if index is None else index[self.order],
            source,
            starts,
            mode="sum",
            per_sample_weights=None if weight is None else weight[self.order],
        )

    def position_of_items(self) -> torch.Tensor:
        """[L] int64: for each item, the index of its key in ``keys``."""
        positions = torch.empty_like(self.order)
        positions[self.order] = torch.arange(len(self.keys), device=self.order.device).repeat_interleave(
            self.counts
        )
        return positions
