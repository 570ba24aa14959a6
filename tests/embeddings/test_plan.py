"""Row-wise sharding that no table can have is refused, not quietly replaced."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from recsys_basis.embeddings.plan import plan_sharding
from recsys_basis.embeddings.sharder import RowOptimizerSharder
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table


def test_ranks_that_no_partitions_divide_among_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    sharder = RowOptimizerSharder((Table("a", 61, 8, 4), Table("b", 30, 8, 2)), {})
    with pytest.raises(ConfigError, match=r"embedding\.sharding = row_wise: .*at most 4.* 3 ranks"):
        plan_sharding(torch.nn.Linear(1, 1), sharder, "row_wise", 8, "cpu")
