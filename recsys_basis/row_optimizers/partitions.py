"""Which virtual partition a row lies in, for state that the rows of one partition share.

Such state belongs to a partition, not to a table or a rank, so it does not depend on the number of ranks
(``recsys_basis.tables``). Partitions are numbered within the group on this rank, shard after shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recsys_basis.tables import TableShard


class Partitions:
    """The ``count`` partitions of a group's shards; ``row_start`` [count] int64, the first row of each."""

    def __init__(self, shards: Sequence[TableShard], device: torch.device) -> None:
        places = torch.tensor([shard.table.rows_per_partition for shard in shards])
        places = places.repeat_interleave(torch.tensor([shard.num_partitions for shard in shards]))
        self.row_start = (places.cumsum(0) - places).to(device)
        self.count = len(places)

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Partitions [U] int64, ascending, of group ``rows`` [U] int64, ascending."""
        return torch.searchsorted(self.row_start, rows, right=True) - 1


def partitions_of_shard(shard: TableShard, per_partition: int = 1) -> tuple[int, int, int]:
    """``RowOptimizer.buckets_of_shard`` of a state with ``per_partition`` bucket rows in each partition."""
    counts = (shard.num_partitions, shard.first_partition, shard.table.num_partitions)
    local, first, whole = (per_partition * count for count in counts)
    return local, first, whole
