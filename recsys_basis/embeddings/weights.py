"""The weights of a group of table shards, in as many bits as ``embedding.weight_dtype`` says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from recsys_basis.embeddings.spec import WeightDtype
from recsys_basis.row_optimizers.bias import TableUpdates
from recsys_basis.row_optimizers.partitions import Partitions
from recsys_basis.row_optimizers.storage import Stored, rounding_of
from recsys_basis.tables import TableShard


class Weights(Stored):
    """Weights [R, D], and the ``updates`` of each table, whose number makes the random bits new.

    All runs round by one seed: their weights and order of rows differ, and so what is rounded.
    """

    def __init__(self, tensor: torch.Tensor, shards: Sequence[TableShard]) -> None:
        device = tensor.device
        starts = Partitions(shards, device).row_start
        super().__init__(tensor, starts, *rounding_of(shards, "weights", 0, device))
        sizes = [shard.num_rows for shard in shards]
        self.updates = TableUpdates([0, *itertools.accumulate(sizes[:-1])], device)


def rounding_state_bytes(dtype: WeightDtype) -> int:
    """Of one shard, beside the rule's state: ``Weights.updates``, which checkpoints keep where it matters."""
    return 0 if dtype == "float32" else torch.int64.itemsize
