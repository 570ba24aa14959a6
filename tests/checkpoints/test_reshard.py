"""Saved at 1, 2 or 4 ranks and loaded at 1, 2 or 4: the same bits, for every row optimizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import tiny_config
from support.trained import IDENTITY, save_checkpoint, train_a_little
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsys_basis.checkpoints.index import read_tensors
from recsys_basis.checkpoints.load import load_checkpoint
from recsys_basis.checkpoints.state import state_of
from recsys_basis.training.runtime import start_runtime

RULES: dict[str, tuple[str, ...]] = {
    **{
        rule: (f"row_optimizer={rule}",)
        for rule in (
            "basis",
            "basis_literal",
            "adam",
            "partial_rowwise_adam",
            "rowwise_adagrad",
            "adagrad",
            "sgd",
        )
    },
    "private momentum": (
        "row_optimizer.direction=head_momentum",
        "row_optimizer.head_bucket_share=0.5",
        "row_optimizer.rows_per_bucket=2.0",
        "row_optimizer.hash=double",
    ),
    "bfloat16 weights": ("row_optimizer=sgd", "embedding.weight_dtype=bfloat16"),
    "fbgemm": ("row_optimizer=rowwise_adagrad", "embedding.kernel=fbgemm"),
}
WORLDS = (1, 2, 4)
STEP = "step-000000001"
OTHER_DATA = IDENTITY | {"data": "more rows"}
GROWN = {"C3": 37, "C7": 300}
"""C7 gets more partitions by it."""


Compared = dict[tuple[str, int], tuple[list[str], dict[str, int]]]


def save_and_load(
    prepared: Path, folder: Path, world: int, saves: bool, sources: tuple[int, ...]
) -> Compared:
    """Train and save each rule as ``folder``/rule/world; compare what loading each of ``sources`` gives."""
    results: Compared = {}
    with start_runtime(tiny_config(prepared, folder).runtime) as runtime:
        for rule, overrides in RULES.items():
            settings = (*overrides, "embedding.sharding=row_wise")
            trainable = train_a_little(runtime, prepared, *settings, steps=2 if saves else 0)
            if saves:
                save_checkpoint(folder / rule / f"{world}", trainable, 1)
            for source in sources:
                path = folder / rule / f"{source}" / STEP
                load_checkpoint(path, trainable, IDENTITY)
                results[rule, source] = compare(state_of(trainable), read_tensors(path))
        if sources:
            grown = ("row_optimizer=adam", "embedding.sharding=row_wise")
            trainable = train_a_little(runtime, prepared, *grown, steps=0, more_ids=GROWN)
            load_checkpoint(folder / "adam" / "2" / STEP, trainable, OTHER_DATA, new_data=True)
            save_checkpoint(folder / "grown" / f"{world}", trainable, 1)
    return results


def compare(state: dict[str, Any], saved: dict[str, torch.Tensor]) -> tuple[list[str], dict[str, int]]:
    """Keys of this rank's tensors that are not the saved bits; entries it holds of each sharded tensor."""
    differing, held = [], {}
    for key, value in state.items():
        if key.startswith("rng/"):
            continue
        if not isinstance(value, ShardedTensor):
            differing += [] if torch.equal(value, saved[key]) else [key]
            continue
        held[key] = 0
        for shard in value.local_shards():
            offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            window = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            held[key] += shard.tensor.numel()
            differing += [] if torch.equal(shard.tensor, saved[key][window]) else [key]
    return differing, held


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reshard")


@pytest.fixture(scope="module")
def compared(prepared: Path, folder: Path) -> dict[int, list[Compared]]:
    """Of each world size, what each rank found."""
    save_and_load(prepared, folder, 1, True, ())
    run_ranks(2, save_and_load, prepared, folder, 2, True, ())
    four = run_ranks(4, save_and_load, prepared, folder, 4, True, WORLDS)
    two = run_ranks(2, save_and_load, prepared, folder, 2, False, WORLDS)
    return {1: [save_and_load(prepared, folder, 1, False, WORLDS)], 2: two, 4: four}


@pytest.mark.parametrize("rule", RULES)
def test_every_world_size_loads_the_bits_of_every_other(
    rule: str, compared: dict[int, list[Compared]], folder: Path
) -> None:
    for world in WORLDS:
        for source in WORLDS:
            saved = read_tensors(folder / rule / f"{source}" / STEP)
            found = [ranks[rule, source] for ranks in compared[world]]
            assert not [key for differing, _ in found for key in differing], (world, source)
            held = sum((Counter(held) for _, held in found), Counter())
            sharded = {key for key in saved if "embedding_bags." in key or held[key]}
            assert len(sharded) >= 26
            assert all(held[key] == saved[key].numel() for key in sharded), (world, source)


def test_each_rank_writes_its_own_file(compared: object, folder: Path) -> None:
    for world in WORLDS:
        files = (folder / "adam" / f"{world}" / STEP).glob("*.distcp")
        assert {path.name.split("_")[2] for path in files} == {str(rank) for rank in range(world)}


def test_grown_tables_are_the_same_at_every_world_size(compared: object, folder: Path) -> None:
    first, second, third = (read_tensors(folder / "grown" / f"{world}" / STEP) for world in WORLDS)
    for key, value in first.items():
        if key.startswith("rng/"):
            continue
        assert torch.equal(second[key], value) and torch.equal(third[key], value), key
