"""Checkpoints: whole or not at all, keyed by names, refused when damaged, hostile, or another model's."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import tiny_config
from support.trained import IDENTITY, at, save_checkpoint, trained

from recsys_basis.checkpoints.folder import CheckpointError, list_checkpoints, sha256_of
from recsys_basis.checkpoints.index import SafeReader
from recsys_basis.checkpoints.load import load_checkpoint
from recsys_basis.training.loop import run_training


@pytest.fixture(scope="module")
def saved(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with trained(prepared) as trainable:
        return save_checkpoint(folder, trainable)


def copy_of(saved: Path, folder: Path) -> Path:
    copy = folder / saved.name
    copy.mkdir()
    for path in saved.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def refusal(path: Path, prepared: Path, *overrides: str) -> str:
    """The message with which loading is refused; nothing of the model may have changed then."""
    with trained(prepared, *overrides, steps=1) as trainable:
        (bags,) = trainable.embedding_bags()
        before = bags.weights.clone()
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path, trainable, IDENTITY)
        assert torch.equal(bags.weights, before)
    return str(caught.value)


def test_keys_are_names_and_tables_are_whole_tensors(saved: Path) -> None:
    entries = SafeReader(saved).read_metadata().state_dict_metadata
    tables = [key for key in entries if key.startswith("model/") and "embedding_bags.C3." in key]
    assert len(tables) == 1
    assert "row_optimizer/C3.energy" in entries and "row_optimizer/C3.second_moment" in entries
    assert any(key.startswith("dense_optimizer/") and key.endswith("/exp_avg") for key in entries)
    assert not any("rank" in key for key in entries)


def test_another_number_of_ranks_loads_the_same_tensors(prepared: Path, tmp_path: Path) -> None:
    """Trained on two ranks row-wise, continued on one: as if one rank had done it all."""
    settings = ("epochs=2", "resume=auto", "checkpoint_every_steps=25", "row_optimizer=adam")
    run_training(tiny_config(prepared, tmp_path / "alone", *settings))
    half = tiny_config(prepared, tmp_path / "moved", "epochs=1", *settings[1:], "embedding.sharding=row_wise")
    run_ranks(2, run_training, half)
    (tmp_path / "moved" / "result.json").unlink()
    result = run_training(tiny_config(prepared, tmp_path / "moved", *settings))
    expected = json.loads((tmp_path / "alone" / "result.json").read_text())
    assert result is not None and result["steps"] == 50
    assert result["auc"] == pytest.approx(expected["auc"], abs=2e-4)
    assert result["log_loss"] == pytest.approx(expected["log_loss"], rel=1e-4)


SHORT = (
    "row_optimizer.moment_dtype=bfloat16",
    "row_optimizer.scalar_dtype=log8",
    "row_optimizer.energy_correction=none",
)


def save_row_wise(prepared: Path, folder: Path) -> list[tuple[str, str, int, torch.Tensor]]:
    """This rank's row state: table, name, first row or bucket row, tensor."""
    with trained(prepared, *SHORT, "embedding.sharding=row_wise") as trainable:
        save_checkpoint(folder, trainable)
        states = [state for bags in trainable.embedding_bags() for state in bags.row_optimizer.table_states()]
        return [(state.table, state.name, state.offset, state.tensor.clone()) for state in states]


def test_state_in_fewer_bits_moves_from_two_ranks_to_one_bit_for_bit(prepared: Path, tmp_path: Path) -> None:
    parts = [part for rank in run_ranks(2, save_row_wise, prepared, tmp_path) for part in rank]
    (path,) = list_checkpoints(tmp_path)
    with trained(prepared, *SHORT, steps=1) as trainable:
        load_checkpoint(path, trainable, IDENTITY)
        (bags,) = trainable.embedding_bags()
        loaded = {(state.table, state.name): state.tensor for state in bags.row_optimizer.table_states()}
        for table, name, offset, part in parts:
            assert torch.equal(loaded[table, name][offset : offset + len(part)], part), (table, name)
            assert loaded[table, name].dtype == part.dtype
    assert {part.dtype for *_, part in parts} == {torch.bfloat16, torch.uint8, torch.int32}
    assert any(offset > 0 for _, _, offset, _ in parts)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_damaged_and_missing_files_are_named(name: str, saved: Path, prepared: Path, tmp_path: Path) -> None:
    copy = copy_of(saved, tmp_path)
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    assert f"{copy / name} is damaged" in refusal(copy, prepared)
    (copy / name).write_bytes(content[:-10])
    assert f"{copy / name} is damaged" in refusal(copy, prepared)
    (copy / name).unlink()
    assert f"{copy / name} is missing" in refusal(copy, prepared)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"progress": 3}'])
def test_broken_record_is_named(text: str, saved: Path, prepared: Path, tmp_path: Path) -> None:
    copy = copy_of(saved, tmp_path)
    (copy / "progress.json").write_text(text)
    assert "progress.json" in refusal(copy, prepared)


@pytest.mark.parametrize(
    "override, key",
    [
        ("row_optimizer=adam", "row_optimizer.rule"),
        ("row_optimizer.rows_per_bucket=50.0", "row_optimizer.rows_per_bucket"),
        ("row_optimizer.hash_seed=1", "row_optimizer.hash_seed"),
        ("embedding.max_partitions=1", "num_partitions"),
        ("dense_optimizer=sgd", "dense_optimizer"),
        ("embedding.weight_dtype=bfloat16", "weight_dtype = 'float32', this run has 'bfloat16'"),
    ],
)
def test_another_model_is_refused_key_by_key(override: str, key: str, saved: Path, prepared: Path) -> None:
    assert key in refusal(saved, prepared, override)


ADAM_FOR_C3 = "+table_row_optimizers.C3=adam"


def test_another_rule_of_one_table_is_refused_by_its_name(saved: Path, prepared: Path) -> None:
    with trained(prepared, ADAM_FOR_C3, steps=1) as trainable, pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved, trainable, IDENTITY)
    assert "table_row_optimizers.C3" in str(caught.value) and "C4" not in str(caught.value)


def test_what_a_table_takes_counts_not_how_it_was_said(prepared: Path, tmp_path: Path) -> None:
    """One table apart, said by exception and by rule; learning rates may change."""
    with trained(prepared, ADAM_FOR_C3) as trainable:
        path = save_checkpoint(tmp_path, trainable)
        expected = [bags.weights.clone() for bags in trainable.embedding_bags()]
    basis = "{base: basis, learning_rate: 0.3}"
    others = f"table_row_optimizers={{C1: {basis}, C2: {basis}, C1?: {basis}, C2?: {basis}}}"
    more = [f"+table_row_optimizers.C{number}={basis}" for number in range(4, 10)]
    with trained(prepared, "row_optimizer=adam", others, *more, steps=1) as trainable:
        load_checkpoint(path, trainable, IDENTITY)
        for bags, weights in zip(trainable.embedding_bags(), expected, strict=True):
            assert torch.equal(bags.weights, weights)


def test_rates_and_clips_may_change(saved: Path, prepared: Path) -> None:
    with trained(prepared, "row_optimizer.learning_rate=0.5", "row_optimizer/clip=cowclip", steps=1) as other:
        assert load_checkpoint(saved, other, IDENTITY).progress == at(3)


def test_another_width_is_refused(saved: Path, prepared: Path) -> None:
    settings = ("embedding.embedding_dim=4", "model.dense_arch=[16,4]")
    assert "tables.C1.embedding_dim = 8, this run has 4" in refusal(saved, prepared, *settings)


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("open('owned', 'w').close()",))


def test_a_hostile_index_executes_nothing(
    saved: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = copy_of(saved, tmp_path)
    (copy / ".metadata").write_bytes(pickle.dumps(Hostile()))
    record = json.loads((copy / "progress.json").read_text())
    record["sha256"][".metadata"] = sha256_of(copy / ".metadata")  # whoever forges one forges the other
    (copy / "progress.json").write_text(json.dumps(record))
    assert "builtins.exec" in refusal(copy, prepared)
    assert not (tmp_path / "owned").exists()


def test_a_hostile_tensor_executes_nothing(
    saved: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = copy_of(saved, tmp_path)
    forged = tmp_path / "forged"
    torch.save(Hostile(), forged)
    size = (copy / "__0_0.distcp").stat().st_size
    (copy / "__0_0.distcp").write_bytes(forged.read_bytes().ljust(size, b"\0"))
    record = json.loads((copy / "progress.json").read_text())
    record["sha256"]["__0_0.distcp"] = sha256_of(copy / "__0_0.distcp")
    (copy / "progress.json").write_text(json.dumps(record))
    with trained(prepared, steps=1) as trainable, pytest.raises(CheckpointError, match="cannot be loaded"):
        load_checkpoint(copy, trainable, IDENTITY)
    assert not (tmp_path / "owned").exists()
