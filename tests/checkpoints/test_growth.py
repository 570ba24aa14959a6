"""A table with more rows than its checkpoint: old ids keep what they had, new ones start as fresh ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.trained import IDENTITY, save_checkpoint, trained

from recsys_basis.checkpoints.folder import CheckpointError
from recsys_basis.checkpoints.index import read_tensors
from recsys_basis.checkpoints.load import START, Loaded, load_checkpoint
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


def refusal(saved: Path, prepared: Path, identity: dict[str, Any], new_data: bool, **options: Any) -> str:
    with (
        trained(prepared, steps=0, **options) as trainable,
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


def test_the_vocabulary_of_a_grown_table_is_another(saved: Path, prepared: Path) -> None:
    identity = OTHER_DATA | {"vocabulary": {"C1": "more values"}}
    with trained(prepared, steps=0, more_ids={"C1": 5}) as trainable:
        assert load_checkpoint(saved, trainable, identity, new_data=True).progress == START
