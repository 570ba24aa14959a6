"""Ids of a KeyedJaggedTensor to rows of their tables (``tables.py``), before any rank sees them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_basis.errors import UserError
from recsys_basis.tables import Table, stripe


class IdRangeError(UserError, IndexError):
    """A batch holds an id that its table does not have."""


class Striping:
    """Maps ids to rows for a set of features, and refuses ids that a table does not have."""

    def __init__(self, table_of_feature: Mapping[str, Table]) -> None:
        self.table_of_feature = dict(table_of_feature)

    def __call__(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same bags with row numbers for ids.

        Raises IdRangeError naming table and id if an id is outside 0..num_ids - 1.
        """
        tables = [self.table_of_feature[key] for key in features.keys()]
        device = features.values().device
        constants = torch.tensor(
            [(table.num_ids, table.num_partitions, table.rows_per_partition) for table in tables],
            device=device,
        )
        lengths = torch.tensor(features.length_per_key(), device=device)
        num_ids, num_partitions, partition_rows = constants.repeat_interleave(lengths, dim=0).unbind(1)
        ids = features.values().long()
        wrong = (ids < 0) | (ids >= num_ids)
        if wrong.any():
            item = int(wrong.nonzero()[0])
            feature = int(torch.searchsorted(lengths.cumsum(0), item, right=True))
            table = tables[feature]
            raise IdRangeError(
                f"table {table.name}: id {int(ids[item])} is outside 0..{table.num_ids - 1}; prepare this "
                "data with the vocabulary that the model was built for"
            )
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=stripe(ids, num_partitions, partition_rows),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            offsets=features.offsets(),
            stride=None if features.variable_stride_per_key() else features.stride(),
            stride_per_key_per_rank=(
                features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
            ),
            inverse_indices=features.inverse_indices_or_none(),
        )
