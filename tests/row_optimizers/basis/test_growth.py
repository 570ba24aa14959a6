"""Growth: shared bucket rows double, every row reads what it read, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels import require_kernels
from support.rows import update_rows

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.spec import BagsKernel
from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.basis import Basis, BasisConfig
from recsys_basis.row_optimizers.basis.buckets import BucketMap, PartitionSizes
from recsys_basis.tables import Table, TableShard

TABLES = (Table("site", 256, 3, 4), Table("device", 3, 3, 1), Table("user", 100, 3, 2))
GROW_AT = (3, 5)
HASHES = ("balanced", "murmur3", "double", "modulo")
FORMS: tuple[dict[str, Any], ...] = (
    {"scalar": "energy"},
    {"scalar": "energy", "head_rows": 10},
    {"direction": "momentum", "scalar": "hypergradient", "signed": True, "head_bucket_share": 0.25},
    {"direction": "head_momentum", "scalar": "none", "head_bucket_share": 0.5},
)
FEWER_BITS: dict[str, Any] = {"scalar": "energy", "moment_dtype": "bfloat16", "scalar_dtype": "log8"}

every_hash = pytest.mark.parametrize("hash_name", HASHES)


def with_forms(*forms: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("form", forms, ids=[" ".join(map(str, form.values())) for form in forms])


every_form = with_forms(*FORMS, FEWER_BITS)


def config_of(hash_name: str, **options: Any) -> BasisConfig:
    values = {"rows_per_bucket": 16.0, "grow_at": GROW_AT, "hash": hash_name} | options
    config = row_optimizer_defaults("basis", **values)
    assert isinstance(config, BasisConfig)
    return config


def basis_of(config: BasisConfig, *shards: TableShard) -> Basis:
    optimizer = create_row_optimizer(config, shards or [TableShard.whole(table) for table in TABLES])
    assert isinstance(optimizer, Basis)
    return optimizer


def batch(step: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randperm(num_rows, generator=generator)[: num_rows // 3].sort().values
    return rows, torch.randn(len(rows), 3, generator=generator)


def train(optimizer: Basis, weights: torch.Tensor, steps: range) -> None:
    for step in steps:
        update_rows(optimizer, weights, *batch(step, optimizer.num_rows), 0.05)
        optimizer.grow(step + 1)


def read_by_rows(optimizer: Basis) -> dict[str, torch.Tensor]:
    """Every state as each row reads it: of both its buckets where it has two."""
    where = optimizer.buckets.of_rows(torch.arange(optimizer.num_rows))
    read = {"private": where.private}
    for number, bucket in enumerate((where.first, where.second)):
        if bucket is not None:
            read[f"V{number}"] = optimizer.second[bucket]
            read[f"t{number}"] = optimizer.updates[bucket]
            if optimizer.config.first_moment == "all":
                read[f"M{number}"] = optimizer.first[bucket]
    if optimizer.config.first_moment == "private":
        read["M"] = optimizer.first[where.private_row[where.private]]
    if where.sign is not None:
        read["sign"] = where.sign
    return read | {name: state.tensor for name, state in optimizer.state.items() if state.per == "row"}


@every_form
@every_hash
def test_growth_changes_nothing_that_a_row_reads(hash_name: str, form: dict[str, Any]) -> None:
    optimizer = basis_of(config_of(hash_name, **form))
    weights = torch.randn(optimizer.num_rows, 3, generator=torch.Generator().manual_seed(9))
    train(optimizer, weights, range(2))
    update_rows(optimizer, weights, *batch(2, optimizer.num_rows), 0.05)
    before = {name: value.clone() for name, value in read_by_rows(optimizer).items()}
    sizes = optimizer.buckets.sizes
    assert not optimizer.grow(2) and optimizer.buckets.sizes is sizes
    assert optimizer.grow(3) and not optimizer.grow(4)
    for name, value in read_by_rows(optimizer).items():
        assert torch.equal(value, before[name]), name
    for old, new in zip(sizes, optimizer.buckets.sizes, strict=True):
        shared = old.num_buckets - old.num_private
        assert new.num_private == old.num_private
        assert new.num_buckets - new.num_private == 2 * shared
    assert (optimizer.updates > 0).any() and len(optimizer.second) == optimizer.buckets.num_buckets


@every_form
@every_hash
def test_it_goes_on_as_one_that_was_born_with_the_larger_size(hash_name: str, form: dict[str, Any]) -> None:
    """The map, the rule and all state of the grown one are those of a fresh one given what its rows read."""
    table = Table("site", 256, 3, 4)
    grown = basis_of(config_of(hash_name, **form), TableShard.whole(table))
    head = grown.buckets.sizes[0].num_private
    larger = form | {"head_rows": 4 * head, "head_bucket_share": 0.0}
    born_size = 4 * (head + 2 * (4 - head))
    born = basis_of(
        config_of(hash_name, **larger, rows_per_bucket=None, bucket_rows=born_size, grow_at=[]),
        TableShard.whole(table),
    )
    weights = torch.zeros(256, 3)
    train(grown, weights, range(3))
    rows = torch.arange(256)
    old, new = grown.buckets.of_rows(rows), born.buckets.of_rows(rows)
    assert torch.equal(old.first, new.first)
    for (name, state), source in zip(born.state.items(), grown.state.values(), strict=True):
        assert state.tensor.shape == source.tensor.shape, name
        state.tensor.copy_(source.tensor)
    again = weights.clone()
    for step in range(3, 5):
        update_rows(grown, weights, *batch(step, 256), 0.05)
        update_rows(born, again, *batch(step, 256), 0.05)
    assert torch.equal(weights, again) and (weights != 0).any()


@every_hash
def test_children_take_the_rows_of_their_parent_and_part(hash_name: str) -> None:
    config = config_of(hash_name, head_rows=8)
    shards = [TableShard.whole(table) for table in TABLES]
    small = BucketMap(config, shards, torch.device("cpu"))
    rows = torch.arange(sum(table.num_rows for table in TABLES))
    for doublings in (1, 2):
        large = BucketMap(config, shards, torch.device("cpu"), doublings)
        parents = large.parents(small)
        assert torch.equal(parents[large.of_rows(rows).first], small.of_rows(rows).first)
        assert set(parents.tolist()) == set(range(small.num_buckets))
        assert len(large.of_rows(rows).first.unique()) > len(small.of_rows(rows).first.unique())


@pytest.mark.parametrize(
    ("num_ids", "options", "expected"),
    [
        (100, {"head_rows": 3}, [6, 9, 15, 27, 51, 99, 99]),  # 3 private, 97 places share the others
        (10, {"rows_per_bucket": 2.0}, [5, 10, 10]),
        (9, {"rows_per_bucket": 1.5, "head_rows": 2}, [6, 6]),  # 7 places have 4 buckets, not 8
        (9, {"rows_per_bucket": 1.0, "head_bucket_share": 1.0}, [9, 9]),
    ],
)
def test_no_partition_has_more_shared_buckets_than_places(
    num_ids: int, options: dict[str, Any], expected: list[int]
) -> None:
    table, config = Table("site", num_ids, 1, 1), config_of("murmur3", **options)
    sizes = [PartitionSizes.of(table, config, doublings) for doublings in range(len(expected))]
    assert [size.num_buckets for size in sizes] == expected


@every_form
def test_shards_grow_as_the_whole(form: dict[str, Any]) -> None:
    config, table = config_of("balanced", **form), TABLES[0]
    whole = basis_of(config, TableShard.whole(table))
    weights = torch.zeros(table.num_rows, 3)
    train(whole, weights, range(6))
    half = table.num_rows // 2
    for offset in (0, half):
        part = basis_of(config, TableShard(table, offset, half))
        own = torch.zeros(half, 3)
        for step in range(6):
            rows, gradients = batch(step, table.num_rows)
            mine = (rows >= offset) & (rows < offset + half)
            update_rows(part, own, rows[mine] - offset, gradients[mine], 0.05)
            part.grow(step + 1)
        assert torch.equal(own, weights[offset : offset + half])
        for mine_state, state in zip(part.table_states(), whole.table_states(), strict=True):
            assert mine_state.global_rows == state.global_rows == len(state.tensor)
            end = mine_state.offset + len(mine_state.tensor)
            assert torch.equal(mine_state.tensor, state.tensor[mine_state.offset : end])


@every_form
def test_a_planner_is_told_the_bytes_of_the_grown_state(form: dict[str, Any]) -> None:
    config, shard = config_of("balanced", **form), TableShard(TABLES[0], 128, 128)
    optimizer = basis_of(config, shard)
    at_first = optimizer.state_bytes()
    optimizer.grow(GROW_AT[-1])
    assert Basis.state_bytes_of(config, shard) == optimizer.state_bytes() > at_first


@with_forms(*FORMS)
@every_hash
def test_cpp_kernels_grow_as_the_reference(hash_name: str, form: dict[str, Any]) -> None:
    require_kernels()
    results = []
    kernels: tuple[BagsKernel, ...] = ("torch", "cpp")
    for kernel in kernels:
        shards = [TableShard.whole(table) for table in TABLES]
        bags = RowOptimizedEmbeddingBags(shards, [0, 1, 2], config_of(hash_name, **form), kernel=kernel)
        sizes = torch.tensor([table.num_rows for table in TABLES])
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            indices = (torch.rand(3, 20, generator=generator) * sizes[:, None]).long().view(-1)
            pooled = bags(indices, torch.arange(61))
            pooled.backward(torch.randn(20, 9, generator=generator))
            bags.grow(step + 1)
        states = {name: state.tensor for name, state in bags.row_optimizer.state.items()}
        results.append(states | {"weights": bags.weights})
    for name, expected in results[0].items():
        # float32 sums of another order, over eight steps
        torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-5, msg=name)
