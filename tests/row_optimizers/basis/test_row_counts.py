"""A row's training count is its id's, wherever its table is cut, and is read from the prepared data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest
import torch
from support.kernels import require_kernels
from support.trained import trained

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.id_counts import IdCounts
from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.basis import Basis
from recsys_basis.row_optimizers.basis.row_counts import RowCounts
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table, TableShard

BY_ROW = row_optimizer_defaults("basis", scalar="hypergradient", hypergradient_by_frequency="row")


def test_rows_of_shards_have_the_counts_of_their_ids() -> None:
    site, user = np.array([5, 90, 90, 40, 7, 7, 7, 1, 1, 1]), np.array([0, 3, 2])
    big = Table("site", 10, 4, 4, IdCounts.of(site))
    shards = [TableShard(big, 6, 6), TableShard.whole(Table("user", 3, 4, 1, IdCounts.of(user)))]
    counts = RowCounts(shards, torch.device("cpu")).of_rows(torch.arange(9))
    # Places 0 to 2 of partitions 2 and 3, which hold ids 1, 5, 9 and 3, 7 and one of nobody (tables.py).
    assert counts[[0, 1, 2, 3, 4]].tolist() == [90, 7, 1, 40, 1]
    assert counts[6:].tolist() == user.tolist()


def test_the_counts_are_those_of_the_training_rows(prepared: Path) -> None:
    key = "row_optimizer"
    overrides = [f"{key}.scalar=hypergradient", f"{key}.hypergradient_by_frequency=row"]
    training = ds.dataset(prepared / "train").to_table()
    with trained(prepared, *overrides) as trainable:
        (bags,) = trainable.embedding_bags()
        rule = bags.row_optimizer
        assert isinstance(rule, Basis)
        for start, shard in zip(rule.row_starts, rule.shards, strict=True):
            table = shard.table
            ids = torch.arange(table.num_ids)
            found = rule.row_counts.of_rows(start + table.rows_of(ids)).tolist()
            column = training[table.name].to_numpy()
            assert found == np.bincount(column, minlength=table.num_ids).tolist(), table.name
        assert "row_counts" not in rule.state, "data, not state"


def test_a_table_without_counts_is_refused_by_name_where_rows_change() -> None:
    shard = TableShard.whole(Table("site", 10, 4, 1))
    with pytest.raises(ConfigError, match=r"table site: .*hypergradient_by_frequency = row"):
        create_row_optimizer(BY_ROW, [shard])
    assert Basis.state_bytes_of(BY_ROW, shard) == 10 * 4 + 2 * 4 * 4 + 4, "a planner needs none"


def test_cpp_divides_by_the_counts_that_torch_does() -> None:
    require_kernels()
    counts = IdCounts.of(np.array([10**12, 5000, 90, 40, 7, 7, 1, 1, 1, 0]))
    shard = TableShard.whole(Table("site", 10, 4, 2, counts))
    # So large a rate that a count decides where s goes, and clips that do not.
    config = BY_ROW.model_copy(
        update={"hypergradient_rate": 100.0, "scalar_min": 1e-6, "scalar_max": 1e6, "learning_rate": 0.1}
    )
    scalars = []
    for kernel in ("torch", "cpp"):
        bags = RowOptimizedEmbeddingBags([shard], [0], config, kernel=kernel)
        for step in range(5):
            gradient = torch.rand(10, 4, generator=torch.Generator().manual_seed(step))
            bags(torch.arange(10), torch.arange(11)).backward(gradient)
        scalars.append(bags.row_optimizer.state["scalar"].tensor)
    torch.testing.assert_close(scalars[1], scalars[0], rtol=1e-5, atol=0)
    moved = (scalars[0] - 1).abs()[shard.table.rows_of(torch.arange(10))]
    assert moved[0] < 1e-6 < moved[1] < 1e-2 < moved[9], "rare ids move, common ones do not"
