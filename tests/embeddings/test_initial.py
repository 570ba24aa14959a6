"""Initial weights: uniform in their bound, one draw for every partition whatever the sharding."""

from __future__ import annotations

from pathlib import Path

import torch
from support.tiny import tiny_config

from recsys_basis.ingest.manifest import Manifest
from recsys_basis.training.build import Trainable, build
from recsys_basis.training.runtime import start_runtime


def weights_of(prepared: Path, *overrides: str) -> tuple[Trainable, dict[str, torch.Tensor]]:
    config = tiny_config(prepared, Path("unused"), *overrides)
    with start_runtime(config.runtime) as runtime:
        trainable = build(config, Manifest.load(prepared), runtime)
        (bags,) = trainable.embedding_bags()
        names = [shard.table.name for shard in bags.row_optimizer.shards]
        return trainable, dict(zip(names, bags.split_embedding_weights(), strict=True))


def test_bound_and_spread_follow_the_number_of_ids(prepared: Path) -> None:
    trainable, weights = weights_of(prepared, "embedding.initial_scale=0.5")
    for table in trainable.tables:
        bound = 0.5 / table.num_ids**0.5
        assert weights[table.name].abs().max() <= bound
        if weights[table.name].numel() > 500:
            assert abs(float(weights[table.name].std()) / (bound / 3**0.5) - 1) < 0.15


def test_weights_of_16_bits_start_next_to_those_of_32(prepared: Path) -> None:
    _, full = weights_of(prepared)
    _, short = weights_of(prepared, "embedding.weight_dtype=bfloat16")
    for name, weight in full.items():
        assert torch.equal(short[name], weight.bfloat16())


def test_partitions_and_tables_start_differently_and_seeds_matter(prepared: Path) -> None:
    trainable, weights = weights_of(prepared)
    table = max(trainable.tables, key=lambda each: each.num_partitions)
    assert table.num_partitions >= 4
    partitions = weights[table.name].split(table.rows_per_partition)
    assert not any(torch.equal(partitions[0], other) for other in partitions[1:])
    _, others = weights_of(prepared, "seed=1")
    assert not torch.equal(weights[table.name], others[table.name])
    _, again = weights_of(prepared, "row_optimizer=adam")
    assert torch.equal(weights[table.name], again[table.name])
