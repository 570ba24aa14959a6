"""A table beyond 2^31 rows and 100 GB of weights, in sparse files: only touched pages take memory.

C++ is held to plain PyTorch, which indexes by 64 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import require_kernels

from recsys_basis.embeddings.cpp_lookup import CppLookup
from recsys_basis.embeddings.features import Bags, Features
from recsys_basis.embeddings.torch_lookup import TorchLookup
from recsys_basis.embeddings.weights import Weights
from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.tables import Table, TableShard

FIRST_TABLE_ROWS, ROWS, WIDTH = 1000, 2**31 + 1000, 13
INDICES = torch.tensor([0, 2**31 - 1, 2**31, 2**20, ROWS - 1, ROWS - 1, ROWS - 3, 2**31 - 1])
TOUCHED = FIRST_TABLE_ROWS + INDICES.unique()
NEIGHBOURS = FIRST_TABLE_ROWS + torch.tensor([-1, 1, 2**31 - 2, 2**31 + 1, ROWS - 2])

Zeros = Callable[..., torch.Tensor]


@pytest.fixture
def zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zeros:
    """``torch.zeros`` in sparse files; so is, from here on, the state that row optimizers make."""
    require_kernels()
    in_memory, numbers = torch.zeros, itertools.count()

    def sparse(*size: Any, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
        small = in_memory(*size, dtype=dtype, device="meta")
        if small.numel() < 2**20:
            return in_memory(*size, dtype=dtype, device=device)
        file = str(tmp_path / str(next(numbers)))
        return torch.from_file(file, shared=True, size=small.numel(), dtype=dtype).view(small.shape)

    monkeypatch.setattr(torch, "zeros", sparse)
    return sparse


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {}),
        ("rowwise_adagrad", {}),
        ("adagrad", {}),
        ("adam", {}),
        ("partial_rowwise_adam", {}),
        ("sm3", {}),
        ("sm3", {"covers": "rows_and_columns"}),
        ("adafactor", {}),
        ("count_sketch_adam", {}),
        ("basis", {}),
        ("basis", {"direction": "momentum", "hash": "double", "rows_per_bucket": 1.0}),
        ("basis", {"direction": "head_momentum", "head_bucket_share": 0.5, "rows_per_bucket": 1.0}),
    ],
)
def test_rows_beyond_32_bits_are_looked_up_and_updated(
    name: str, options: dict[str, Any], zeros: Zeros
) -> None:
    tables = Table("small", FIRST_TABLE_ROWS, WIDTH, 4), Table("large", ROWS, WIDTH, 64)
    shards = [TableShard.whole(table) for table in tables]
    config = row_optimizer_defaults(name, **options)
    features = Features.of(shards, (0, FIRST_TABLE_ROWS), [1], "sum", "cpu")
    bags = Bags(INDICES, torch.arange(len(INDICES) + 1), None)
    results = []
    for lookup in (TorchLookup(features), CppLookup(features)):
        optimizer = create_row_optimizer(config, shards)
        weights = zeros(optimizer.num_rows, WIDTH)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            gradient = torch.randn(len(INDICES), WIDTH, generator=generator)
            sums = lookup.sum_by_row(gradient, bags, with_counts=False)
            assert torch.equal(sums.rows, TOUCHED)
            lookup.update(optimizer, Weights(weights, shards), sums, 0.1)
        assert weights[TOUCHED].abs().amin() > 0
        assert not weights[NEIGHBOURS].any()
        results.append(lookup.pool(weights, bags))
        torch.testing.assert_close(results[-1], weights[FIRST_TABLE_ROWS + INDICES])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
