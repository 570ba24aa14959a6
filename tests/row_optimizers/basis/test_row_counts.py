"""A row's training count is its id's, wherever its table is cut, and is read from the prepared data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest
import torch
from support.trained import trained

from recsys_basis.embeddings.choice import choose_bags_kernel
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


def test_no_kernel_claims_to_know_the_counts() -> None:
    assert choose_bags_kernel("auto", BY_ROW, "cpu") == "torch"
    with pytest.raises(ConfigError, match="hypergradient_by_frequency = row has no C"):
        choose_bags_kernel("cpp", BY_ROW, "cpu")
