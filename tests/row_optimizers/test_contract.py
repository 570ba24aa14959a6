"""What every rule must do, whatever its formula; the rules are those of support/row_variants.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.row_variants import IDS, VARIANTS
from support.rows import update_rows
from torch.utils._python_dispatch import TorchDispatchMode

from recsys_basis.row_optimizers import (
    ROW_OPTIMIZERS,
    create_row_optimizer,
    row_optimizer_class,
    row_optimizer_defaults,
)
from recsys_basis.row_optimizers.base import RowOptimizer, RowOptimizerConfig
from recsys_basis.row_optimizers.storage import DTYPES
from recsys_basis.segments import Segments
from recsys_basis.tables import Table, TableShard

every_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)

TABLES = (("site", 118, 4), ("device", 3, 1), ("user", 61, 2), ("page", 40, 4))
"""Name, ids, partitions; some ids do not fill their last partition."""


def config_of(name: str, options: dict[str, Any]) -> RowOptimizerConfig:
    return row_optimizer_defaults(
        name, **options, **({} if "weight_decay" in options else {"weight_decay": 0.1})
    )


def tables_of_width(dim: int) -> list[Table]:
    return [Table(name, num_ids, dim, partitions) for name, num_ids, partitions in TABLES]


def initial_weights(num_rows: int, dim: int) -> torch.Tensor:
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(99))


def draw(batches: Any, num_rows: int, dim: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Distinct rows, ascending, and their summed gradients, for each step."""
    result = []
    for items, gradients in batches(num_rows, dim, steps, 5):
        segments = Segments.of(items)
        result.append((segments.keys, segments.sum(gradients)))
    return result


def run(
    optimizer: RowOptimizer, weights: torch.Tensor, steps: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    for rows, gradients in steps:
        update_rows(optimizer, weights, rows, gradients, 0.05)


def states_of(optimizer: RowOptimizer) -> dict[tuple[str, str], torch.Tensor]:
    """Copy of all state by (table, state), of an optimizer whose shards are whole tables."""
    return {(state.table, state.name): state.tensor.clone() for state in optimizer.table_states()}


def assert_same(left: dict[Any, torch.Tensor], right: dict[Any, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), key


def test_every_rule_is_in_the_table() -> None:
    assert {config_of(name, options).rule for name, options in VARIANTS} == set(ROW_OPTIMIZERS)


@every_variant
def test_same_inputs_give_the_same_bits_and_all_is_finite(name: str, options: Any, batches: Any) -> None:
    shards = [TableShard.whole(table) for table in tables_of_width(16)]
    results = []
    for _ in range(2):
        optimizer = create_row_optimizer(config_of(name, options), shards)
        weights = initial_weights(optimizer.num_rows, 16)
        run(optimizer, weights, draw(batches, optimizer.num_rows, 16, 10))
        results.append({("weights", ""): weights, **states_of(optimizer)})
    assert_same(*results)
    assert all(torch.isfinite(tensor).all() for tensor in results[0].values())
    assert not torch.equal(results[0]["weights", ""], initial_weights(optimizer.num_rows, 16))


@every_variant
def test_gradients_and_rows_are_left_as_they_were(name: str, options: Any, batches: Any) -> None:
    shards = [TableShard.whole(table) for table in tables_of_width(3)]
    optimizer = create_row_optimizer(config_of(name, options), shards)
    (rows, gradients), *_ = draw(batches, optimizer.num_rows, 3, 1)
    before = rows.clone(), gradients.clone()
    run(optimizer, initial_weights(optimizer.num_rows, 3), [(rows, gradients)] * 2)
    assert torch.equal(rows, before[0]) and torch.equal(gradients, before[1])


@every_variant
def test_untouched_rows_and_partitions_keep_weights_and_state(name: str, options: Any, batches: Any) -> None:
    """A step inside partition 1 of the first table leaves everything else as it was."""
    tables = tables_of_width(3)
    optimizer = create_row_optimizer(config_of(name, options), [TableShard.whole(table) for table in tables])
    weights = initial_weights(optimizer.num_rows, 3)
    run(optimizer, weights, draw(batches, optimizer.num_rows, 3, 5))
    old_weights, old_states = weights.clone(), states_of(optimizer)
    size = tables[0].rows_per_partition
    rows = torch.tensor([size, size + 2, 2 * size - 1])
    update_rows(optimizer, weights, rows, torch.ones(3, 3), 0.05)

    changed = (weights != old_weights).any(1).nonzero().view(-1)
    assert changed.tolist() == rows.tolist()
    for state in optimizer.table_states():
        if state.per == "table":
            continue
        difference = (state.tensor != old_states[state.table, state.name]).view(len(state.tensor), -1)
        changed = difference.any(1).nonzero().view(-1)
        if state.table != tables[0].name:
            assert len(changed) == 0
        elif state.per == "row":
            assert set(changed.tolist()) <= set(rows.tolist())
        else:
            per_partition = state.global_rows // tables[0].num_partitions
            assert all(index // per_partition == 1 for index in changed.tolist())


@every_variant
@pytest.mark.parametrize("dim", [1, 16, 100])
def test_shards_of_whole_partitions_give_the_bits_of_the_whole(
    name: str, options: Any, dim: int, batches: Any
) -> None:
    """As two ranks would: each table cut in two where it has partitions to cut."""
    tables = tables_of_width(dim)
    whole = create_row_optimizer(config_of(name, options), [TableShard.whole(table) for table in tables])
    steps = draw(batches, whole.num_rows, dim, 8)
    whole_weights = initial_weights(whole.num_rows, dim)
    run(whole, whole_weights, steps)

    for rank in range(2):
        shards, group_rows = [], []
        for table, start in zip(tables, whole.row_starts, strict=True):
            if table.num_partitions == 1:
                half, offset = (table.num_rows, 0) if rank == 0 else (0, 0)
            else:
                half = table.num_rows // 2
                offset = rank * half
            shards.append(TableShard(table, offset, half))
            group_rows.append(torch.arange(start + offset, start + offset + half))
        of_whole = torch.cat(group_rows)
        local = torch.full((whole.num_rows,), -1)
        local[of_whole] = torch.arange(len(of_whole))
        part = create_row_optimizer(config_of(name, options), shards)
        weights = initial_weights(whole.num_rows, dim)[of_whole]
        for rows, gradients in steps:
            mine = local[rows] >= 0
            update_rows(part, weights, local[rows[mine]], gradients[mine], 0.05)

        assert torch.equal(weights, whole_weights[of_whole])
        whole_states = states_of(whole)
        for state in part.table_states():
            expected = whole_states[state.table, state.name]
            if state.per == "table":
                assert torch.equal(state.tensor, expected)
                continue
            assert state.global_rows == len(expected)
            end = state.offset + len(state.tensor)
            assert torch.equal(state.tensor, expected[state.offset : end]), (state.table, state.name)


class LargeOutputs(TorchDispatchMode):
    """Operators that made or wrote a tensor of more than ``limit`` numbers."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (list, tuple)) else [result]
        if any(isinstance(output, torch.Tensor) and output.numel() > self.limit for output in outputs):
            self.names.add(func.overloadpacket.__name__)
        return result


@every_variant
def test_work_follows_the_touched_rows_not_the_table(name: str, options: Any) -> None:
    """Only the scatter of touched rows may name a tensor as large as weights or state."""
    shards = [TableShard.whole(Table("site", 40_000, 3, 4))]
    optimizer = create_row_optimizer(config_of(name, options), shards)
    weights = initial_weights(optimizer.num_rows, 3)
    rows = torch.arange(0, 40_000, 2_000)
    with LargeOutputs(limit=1_000) as large:
        update_rows(optimizer, weights, rows, torch.ones(len(rows), 3), 0.05)
    assert large.names == {"index_copy_"}


@every_variant
def test_a_group_of_tables_gives_the_bits_of_one_group_each(name: str, options: Any, batches: Any) -> None:
    tables = tables_of_width(16)
    group = create_row_optimizer(config_of(name, options), [TableShard.whole(table) for table in tables])
    steps = draw(batches, group.num_rows, 16, 8)
    group_weights = initial_weights(group.num_rows, 16)
    run(group, group_weights, steps)
    states: dict[tuple[str, str], torch.Tensor] = {}
    for table, start in zip(tables, group.row_starts, strict=True):
        end = start + table.num_rows
        single = create_row_optimizer(config_of(name, options), [TableShard.whole(table)])
        weights = initial_weights(group.num_rows, 16)[start:end]
        for rows, gradients in steps:
            mine = (rows >= start) & (rows < end)
            update_rows(single, weights, rows[mine] - start, gradients[mine], 0.05)
        assert torch.equal(weights, group_weights[start:end])
        states |= states_of(single)
    assert_same(states, states_of(group))


@every_variant
def test_an_empty_batch_only_counts(name: str, options: Any, batches: Any) -> None:
    shards = [TableShard.whole(table) for table in tables_of_width(3)]
    optimizer = create_row_optimizer(config_of(name, options), shards)
    weights = initial_weights(optimizer.num_rows, 3)
    run(optimizer, weights, draw(batches, optimizer.num_rows, 3, 2))
    old_weights, old_states = weights.clone(), states_of(optimizer)
    update_rows(optimizer, weights, torch.empty(0, dtype=torch.int64), torch.empty(0, 3), 0.05)
    assert torch.equal(weights, old_weights)
    for state in optimizer.table_states():
        expected = old_states[state.table, state.name] + (1 if state.per == "table" else 0)
        assert torch.equal(state.tensor, expected)


@every_variant
@pytest.mark.parametrize("dim", [1, 3])
def test_zero_gradients_move_nothing_to_nan(name: str, options: Any, dim: int, batches: Any) -> None:
    shards = [TableShard.whole(table) for table in tables_of_width(dim)]
    optimizer = create_row_optimizer(config_of(name, options | {"weight_decay": 0.0}), shards)
    weights = initial_weights(optimizer.num_rows, dim)
    rows = torch.arange(0, optimizer.num_rows, 2)
    run(optimizer, weights, [(rows, torch.zeros(len(rows), dim))] * 2)
    assert torch.equal(weights, initial_weights(optimizer.num_rows, dim))
    half = torch.ones(len(rows), dim)
    half[::2] = 0
    run(optimizer, weights, [(rows, half), (rows, torch.zeros(len(rows), dim)), (rows, 1e-22 * half)])
    assert torch.isfinite(weights).all()
    assert all(torch.isfinite(tensor).all() for tensor in states_of(optimizer).values())


@every_variant
def test_state_views_alias_live_memory_and_cover_it(name: str, options: Any, batches: Any) -> None:
    tables = tables_of_width(3)
    optimizer = create_row_optimizer(config_of(name, options), [TableShard.whole(table) for table in tables])
    run(optimizer, initial_weights(optimizer.num_rows, 3), draw(batches, optimizer.num_rows, 3, 2))
    sizes = {table.name: table.num_rows for table in tables}
    num_bytes = 0
    for state in optimizer.table_states():
        assert state.offset == 0 and state.global_rows == len(state.tensor)
        if state.per == "row":
            assert state.global_rows == sizes[state.table]
        num_bytes += state.tensor.numel() * state.tensor.element_size()
        if state.name.endswith("updates"):
            assert state.tensor.dtype in (torch.int32, torch.int64)
        else:
            per_row = state.name in ("scalar", "energy")
            wanted = options.get("scalar_dtype" if per_row else "moment_dtype", "float32")
            assert state.tensor.dtype == DTYPES[wanted]
    assert num_bytes == optimizer.state_bytes()
    for state in optimizer.table_states():
        state.tensor.fill_(7)
    assert all((state.tensor == 7).all() for state in optimizer.state.values())


@every_variant
@pytest.mark.parametrize("dim", [1, 3])
def test_state_bytes_are_known_before_any_state_is_made(name: str, options: Any, dim: int) -> None:
    config = config_of(name, options)
    tables = tables_of_width(dim)
    size = tables[0].rows_per_partition
    for shard in (*map(TableShard.whole, tables), TableShard(tables[0], size, 2 * size)):
        expected = create_row_optimizer(config, [shard]).state_bytes()
        assert row_optimizer_class(config.rule).state_bytes_of(config, shard) == expected


@every_variant
def test_state_continues_in_another_optimizer(name: str, options: Any, batches: Any) -> None:
    """Copying every state view is a full checkpoint."""
    shards = [TableShard.whole(table) for table in tables_of_width(3)]
    first = create_row_optimizer(config_of(name, options), shards)
    steps = draw(batches, first.num_rows, 3, 8)
    weights = initial_weights(first.num_rows, 3)
    run(first, weights, steps[:4])
    second = create_row_optimizer(config_of(name, options), shards)
    for source, target in zip(first.table_states(), second.table_states(), strict=True):
        target.tensor.copy_(source.tensor)
    weights_again = weights.clone()
    run(first, weights, steps[4:])
    run(second, weights_again, steps[4:])
    assert torch.equal(weights, weights_again)
    assert_same(states_of(first), states_of(second))
