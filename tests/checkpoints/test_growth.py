"""A table with more rows than its checkpoint: old ids keep what they had, new ones start as fresh ones."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support.trained import IDENTITY, at, save_checkpoint, trained

from recsys_basis.checkpoints.folder import CheckpointError
from recsys_basis.checkpoints.index import read_tensors
from recsys_basis.checkpoints.load import START, Loaded, load_checkpoint
from recsys_basis.checkpoints.save import CheckpointSaver
from recsys_basis.checkpoints.state import state_of
from recsys_basis.embeddings.state import local_tensors
from recsys_basis.training.build import Trainable

OTHER_DATA = IDENTITY | {"data": "more rows"}
GROWN = {"C3": 37, "C7": 300}


def tensors_of(trainable: Trainable) -> dict[str, torch.Tensor]:
    return {key: local_tensors(value)[0].clone() for key, value in state_of(trainable).items()}


@pytest.fixture(scope="module")
def saved(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with trained(prepared) as trainable:
        return save_checkpoint(tmp_path_factory.mktemp("growth"), trainable)


def load_into(
    saved: Path, prepared: Path, **options: Any
) -> tuple[Loaded, dict[str, Any], dict[str, Any], Any]:
    with trained(prepared, steps=0, **options) as trainable:
        fresh = tensors_of(trainable)
        loaded = load_checkpoint(saved, trainable, OTHER_DATA, new_data=True)
        return loaded, fresh, tensors_of(trainable), {table.name: table for table in trainable.tables}


def test_rows_follow_their_ids(saved: Path, prepared: Path) -> None:
    old = read_tensors(saved)
    with trained(prepared, steps=0) as trainable:
        old_tables = {table.name: table for table in trainable.tables}
    loaded, fresh, now, tables = load_into(saved, prepared, more_ids=GROWN)
    assert tables["C3"].num_partitions == old_tables["C3"].num_partitions
    assert tables["C7"].num_partitions > old_tables["C7"].num_partitions > 1
    for name in GROWN:
        ids = torch.arange(old_tables[name].num_ids)
        weight = next(key for key in now if key.endswith(f"embedding_bags.{name}.weight"))
        for key in (weight, f"row_optimizer/{name}.energy"):
            rows, old_rows = tables[name].rows_of(ids), old_tables[name].rows_of(ids)
            assert torch.equal(now[key][rows], old[key][old_rows])
            assert not torch.equal(now[key][rows], fresh[key][rows])
            new = torch.ones(len(now[key]), dtype=torch.bool)
            new[rows] = False
            assert new.any() and torch.equal(now[key][new], fresh[key][new])
        for state in ("second_moment", "updates"):
            assert now[f"row_optimizer/{name}.{state}"].abs().sum() == 0
    others = [key for key in now if not any(f".{name}." in f".{key}".replace("/", ".") for name in GROWN)]
    assert len(others) > 100
    for key in others:
        if not key.startswith("rng/"):
            assert torch.equal(now[key], old[key]), key
    assert loaded.progress == START
    assert [line for line in loaded.told if line.startswith("table C3 has 37 new ids from id ")]
    assert len(loaded.told) == 3


def test_other_data_of_the_same_vocabulary_takes_the_whole_model(saved: Path, prepared: Path) -> None:
    loaded, _, now, _ = load_into(saved, prepared)
    old = read_tensors(saved)
    assert loaded.progress == START and len(loaded.told) == 1
    assert all(torch.equal(now[key], old[key]) for key in now)


def refusal(
    saved: Path,
    prepared: Path,
    identity: dict[str, Any],
    new_data: bool,
    overrides: tuple[str, ...] = (),
    **options: Any,
) -> str:
    with (
        trained(prepared, *overrides, steps=0, **options) as trainable,
        pytest.raises(CheckpointError) as caught,
    ):
        load_checkpoint(saved, trainable, identity, new_data)
    return str(caught.value)


def test_what_is_no_growth_is_refused(saved: Path, prepared: Path) -> None:
    assert "tables.C3.num_ids" in refusal(saved, prepared, OTHER_DATA, True, more_ids={"C3": -1})
    other_ids = OTHER_DATA | {"vocabulary": {"C1": "other values"}}
    assert "vocabulary.C1 = 'these values', this run has 'other" in refusal(saved, prepared, other_ids, True)
    assert "data = 'these rows'" in refusal(saved, prepared, OTHER_DATA, False)
    assert "tables.C3.num_ids" in refusal(saved, prepared, IDENTITY, True, more_ids={"C3": 1})


def test_the_old_ids_of_a_grown_table_mean_what_they_meant(prepared: Path, tmp_path: Path) -> None:
    """A vocabulary fitted anew orders its ids by other counts: old rows would go to other values."""
    values = pq.read_table(prepared / "vocabulary" / "C1.parquet")["value"].to_pylist()
    saved = {}
    with trained(prepared, steps=0) as trainable:
        for name, each in (("same", values), ("swapped", [values[1], values[0], *values[2:]])):
            digest = hashlib.sha256(struct.pack(f"<{len(each)}I", *each)).hexdigest()
            identity = IDENTITY | {"vocabulary": {"C1": digest}}
            saved[name] = CheckpointSaver(tmp_path / name, trainable, identity).save(at(3), wait=True)
    identity = OTHER_DATA | {"vocabulary": {"C1": "more values"}}
    with trained(prepared, steps=0, more_ids={"C1": 5}) as trainable:
        assert load_checkpoint(saved["same"], trainable, identity, new_data=True).progress == START
    refused = refusal(saved["swapped"], prepared, identity, True, more_ids={"C1": 5})
    assert "vocabulary.C1 = " in refused and "tables" not in refused


def test_a_budget_of_tables_that_have_grown_is_refused_with_the_way_on(
    prepared: Path, tmp_path: Path
) -> None:
    options = ("row_optimizer.rows_per_bucket=null", "row_optimizer.state_budget=20%")
    with trained(prepared, *options) as trainable:
        path = save_checkpoint(tmp_path, trainable)
        kept = trainable.row_optimizer_of_table
    refused = refusal(path, prepared, OTHER_DATA, True, overrides=options, more_ids={"C3": 500})
    assert "rows_per_bucket = " in refused and "state_budget is solved for the sizes" in refused
    # As it says: what was saved, table by table.
    of_tables = ", ".join(
        f"{name}: {{base: basis, rows_per_bucket: {each.rows_per_bucket!r}, "
        f"head_bucket_share: {each.head_bucket_share}}}"
        for name, each in kept.items()
    )
    with trained(
        prepared, f"table_row_optimizers={{{of_tables}}}", steps=0, more_ids={"C3": 500}
    ) as trainable:
        assert load_checkpoint(path, trainable, OTHER_DATA, new_data=True).progress == START


def test_a_count_of_updates_stays_with_the_state_that_it_corrects(
    saved: Path, prepared: Path, tmp_path: Path
) -> None:
    """Fresh sketches divided by 1 - beta^t of an old t would take steps many times too large."""
    sketches = "row_optimizer=count_sketch_adam"
    with trained(prepared, sketches) as trainable:
        of_sketches = save_checkpoint(tmp_path, trainable)
    for folder, state, expected, options in (
        (of_sketches, "updates", 0, (sketches,)),
        (saved, "table_updates", 3, ()),  # of the rows' energies, which move to the larger table
    ):
        with trained(prepared, *options, steps=0, more_ids=GROWN) as trainable:
            load_checkpoint(folder, trainable, OTHER_DATA, new_data=True)
            now = tensors_of(trainable)
        assert {int(now[f"row_optimizer/{name}.{state}"]) for name in GROWN} == {expected}
        assert int(now[f"row_optimizer/C1.{state}"]) == 3


def test_grown_buckets_are_not_taken_back_to_step_0(prepared: Path, tmp_path: Path) -> None:
    options = ("row_optimizer.rows_per_bucket=20", "row_optimizer.grow_at=[3]")
    paths = []
    with trained(prepared, *options) as trainable:
        paths.append(save_checkpoint(tmp_path / "before", trainable, step=2))
        trainable.grow(3)
        paths.append(save_checkpoint(tmp_path / "after", trainable))
    assert "has grown in its 3 steps" in refusal(paths[1], prepared, OTHER_DATA, True, overrides=options)
    for path, identity in ((paths[0], OTHER_DATA), (paths[1], IDENTITY)):
        with trained(prepared, *options, steps=0) as trainable:
            load_checkpoint(path, trainable, identity, new_data=True)
