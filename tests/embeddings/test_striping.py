"""Ids to rows of several tables at once, against the one-table formula; hot ids spread over shards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_basis.embeddings.striping import IdRangeError, Striping
from recsys_basis.tables import Table

TABLES = {"x": Table("a", 61, 8, 4), "y": Table("b", 30, 8, 2), "z": Table("a", 61, 8, 4)}


def test_each_feature_uses_its_own_table() -> None:
    values = torch.tensor([60, 0, 5, 29, 17, 60], dtype=torch.int32)
    lengths = torch.tensor([2, 0, 1, 1, 0, 2])
    weights = torch.rand(6)
    features = KeyedJaggedTensor(keys=["x", "y", "z"], values=values, lengths=lengths, weights=weights)
    rows = Striping(TABLES)(features)
    expected = [
        TABLES["x"].rows_of(values[:2]),
        TABLES["y"].rows_of(values[2:4]),
        TABLES["z"].rows_of(values[4:]),
    ]
    assert rows.values().tolist() == torch.cat(expected).tolist()
    assert rows.keys() == features.keys() and rows.lengths().tolist() == lengths.tolist()
    assert torch.equal(rows.weights(), weights)


@pytest.mark.parametrize(
    "place, bad, words", [(1, 61, "table a: id 61"), (3, 30, "table b: id 30"), (5, -1, "table a: id -1")]
)
def test_id_out_of_range_names_table_and_id(place: int, bad: int, words: str) -> None:
    values = torch.tensor([1, 2, 3, 4, 5, 6])
    values[place] = bad
    features = KeyedJaggedTensor(
        keys=["x", "y", "z"], values=values, lengths=torch.tensor([1, 1, 1, 1, 1, 1])
    )
    with pytest.raises(IdRangeError, match=words):
        Striping(TABLES)(features)


def test_an_empty_batch_passes() -> None:
    features = KeyedJaggedTensor(
        keys=["x"], values=torch.empty(0, dtype=torch.int64), lengths=torch.zeros(3).int()
    )
    assert Striping(TABLES)(features).values().numel() == 0


def test_zipf_ids_load_row_wise_shards_alike() -> None:
    """Busiest of W contiguous row shards over the mean, zipf 1.05; the figures of tables.py."""
    table = Table("hot", 200_000, 8, 64)
    traffic = 1.0 / np.arange(1, table.num_ids + 1) ** 1.05
    rows = table.rows_of(torch.arange(table.num_ids)).numpy()
    for world_size, most in ((2, 1.08), (4, 1.24)):
        shard = rows // (table.num_rows // world_size)
        load = np.bincount(shard, weights=traffic, minlength=world_size)
        assert load.max() / load.mean() < most
