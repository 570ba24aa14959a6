"""Training counts of a group's rows: found by id in their table's few runs, never stored for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recsys_basis.schema import ConfigError
from recsys_basis.tables import TableShard, unstripe


class RowCounts:
    """c of ``spec.py``. It is data, not state: no checkpoint holds it, and it follows the data of the run."""

    def __init__(self, shards: Sequence[TableShard], device: torch.device) -> None:
        """Raises ConfigError naming a table whose counts nobody gave."""
        starts, counts, places = [], [], []
        first_row = first_key = 0
        for shard in shards:
            table = shard.table
            if table.counts is None:
                raise ConfigError(
                    f"table {table.name}: row_optimizer.hypergradient_by_frequency = row needs the training "
                    "counts of its ids: give its Table counts, or set hypergradient_by_frequency = bucket"
                )
            starts.append(table.counts.starts + first_key)
            counts.append(table.counts.counts)
            places.append(
                (first_row, shard.row_offset, table.num_partitions, table.rows_per_partition, first_key)
            )
            first_row, first_key = first_row + shard.num_rows, first_key + table.num_rows
        self.starts, self.counts = torch.cat(starts).to(device), torch.cat(counts).to(device)
        self.places = torch.tensor(places, device=device).T.contiguous()

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """[U] int64: how often the id of each of the group's ``rows`` [U] int64 came in the training part."""
        shard = torch.searchsorted(self.places[0], rows, right=True) - 1
        first_row, offset, partitions, rows_per_partition, first_key = self.places[:, shard]
        ids = unstripe(rows - first_row + offset, partitions, rows_per_partition)
        return self.counts[torch.searchsorted(self.starts, first_key + ids, right=True) - 1]
