"""Saving: from a snapshot, whole or not at all, one at a time; what is kept; failures that say why."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.trained import IDENTITY, at, save_checkpoint, trained
from torch.distributed.checkpoint.filesystem import FileSystem

from recsys_basis.checkpoints import folder, save
from recsys_basis.checkpoints.folder import CheckpointError, Record, best_checkpoint, list_checkpoints
from recsys_basis.checkpoints.index import read_tensors
from recsys_basis.checkpoints.load import Loaded, load_checkpoint
from recsys_basis.checkpoints.save import CheckpointSaver
from recsys_basis.checkpoints.state import state_of
from recsys_basis.embeddings.state import local_tensors
from recsys_basis.errors import NonFiniteError


def test_the_two_newest_are_kept(prepared: Path, tmp_path: Path) -> None:
    with trained(prepared) as trainable:
        for step in (1, 2, 3):
            save_checkpoint(tmp_path, trainable, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000002", "step-000000003"]


def test_a_crash_while_saving_leaves_the_previous_one(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trained(prepared) as trainable:
        first = save_checkpoint(tmp_path, trainable)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

            def write_half(state: object, storage_writer: dcp.FileSystemWriter, **_: object) -> None:
                (Path(storage_writer.path) / "__0_0.distcp").write_bytes(b"half")
                raise KeyboardInterrupt

            patch.setattr(save.dcp, "save", write_half)
            save_checkpoint(tmp_path, trainable, 9)
        assert list_checkpoints(tmp_path) == [first]
        assert load_checkpoint(first, trainable, IDENTITY) == Loaded(at(3))
        again = save_checkpoint(tmp_path, trainable, 9)
    assert list_checkpoints(tmp_path) == [first, again]
    assert not list(tmp_path.glob("*.partial"))


def test_what_cannot_be_loaded_again_is_not_saved(prepared: Path, tmp_path: Path) -> None:
    with trained(prepared) as trainable:
        next(iter(trainable.dense_optimizer.state.values()))["count"] = 3
        with pytest.raises(CheckpointError, match=r"dense_optimizer/.*/count is a int"):
            save_checkpoint(tmp_path, trainable)
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_is_not_finite_is_named_and_not_saved(prepared: Path, tmp_path: Path) -> None:
    with trained(prepared) as trainable:
        (bags,) = trainable.embedding_bags()
        bags.split_embedding_weights()[2][0, 0] = float("nan")
        with pytest.raises(
            NonFiniteError, match=r"embedding_bags\.C3\.weight holds values that are not finite"
        ):
            save_checkpoint(tmp_path, trainable)
    assert not list(tmp_path.iterdir())


def steps_in(path: Path) -> list[int]:
    return [int(checkpoint.name.removeprefix("step-")) for checkpoint in list_checkpoints(path)]


def test_training_goes_on_while_a_snapshot_is_written(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trained(prepared, "tower_average_decay=0.9") as trainable:
        expected = read_tensors(save_checkpoint(tmp_path / "now", trainable))
        may_write, original = threading.Event(), dcp.save

        def write_later(*arguments: Any, **options: Any) -> Any:
            assert may_write.wait(60)
            return original(*arguments, **options)

        monkeypatch.setattr(save.dcp, "save", write_later)
        saver = CheckpointSaver(tmp_path / "beside", trainable, IDENTITY)
        path = saver.save(at(3))
        assert not path.exists()
        for value in state_of(trainable).values():
            for tensor in local_tensors(value):
                with torch.no_grad():
                    tensor.add_(1)
        torch.rand(3)
        may_write.set()
        saver.wait()
    written = read_tensors(path)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in expected)


def test_one_save_at_a_time(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trained(prepared) as trainable:
        saver = CheckpointSaver(tmp_path, trainable, IDENTITY)
        original, writing = saver._write, threading.Lock()

        def write_alone(*arguments: Any) -> None:
            assert writing.acquire(blocking=False)
            original(*arguments)
            writing.release()

        monkeypatch.setattr(saver, "_write", write_alone)
        saver.save(at(1))
        saver.save(at(2))
        saver.save(at(3), wait=True)
    assert steps_in(tmp_path) == [2, 3]


def test_a_save_that_fails_in_the_background_is_raised(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trained(prepared) as trainable:
        saver = CheckpointSaver(tmp_path, trainable, IDENTITY)
        saver.save(at(1), wait=True)
        with monkeypatch.context() as patch:
            fill_disk(patch)
            saver.save(at(2))
            saver._thread.submit(lambda: None).result()  # after the writing
        assert saver.has_failed()
        with pytest.raises(CheckpointError, match=r"step-000000002 could not be saved: .*No space left"):
            saver.save(at(3))
        assert not saver.has_failed()
    assert steps_in(tmp_path) == [1]


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """Every file of tensors is /dev/full, which takes no byte."""
    original = FileSystem.create_stream

    def full(self: FileSystem, path: Any, mode: str) -> Any:
        return original(self, Path("/dev/full") if "w" in mode else path, mode)

    patch.setattr(FileSystem, "create_stream", full)


def fail_record(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: Record, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path / "progress.json"))

    patch.setattr(Record, "write", refuse)


def read_only(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system", str(self))

    patch.setattr(Path, "mkdir", refuse)


@pytest.mark.parametrize(
    "fault, words",
    [(fill_disk, "No space left"), (fail_record, "No space left.*progress.json"), (read_only, "Read-only")],
)
def test_a_disk_that_takes_nothing(
    fault: Any, words: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Says what and why, leaves the checkpoint before as it was, and nothing half written."""
    with trained(prepared) as trainable:
        first = save_checkpoint(tmp_path, trainable)
        with monkeypatch.context() as patch:
            fault(patch)
            with pytest.raises(CheckpointError, match=words) as caught:
                save_checkpoint(tmp_path, trainable, 9)
        assert f"newest whole checkpoint is {first}" in str(caught.value)
        assert list(tmp_path.iterdir()) == [first]
        assert load_checkpoint(first, trainable, IDENTITY) == Loaded(at(3))
        save_checkpoint(tmp_path, trainable, 9)
    assert steps_in(tmp_path) == [3, 9]


@pytest.mark.parametrize(
    "metric, values", [("auc", [0.6, 0.8, 0.7, 0.8]), ("log_loss", [0.6, 0.4, 0.5, 0.4])]
)
def test_the_best_is_kept_beside_the_newest(
    metric: str, values: list[float], prepared: Path, tmp_path: Path
) -> None:
    settings = (f"checkpoint_best_by={metric}", "evaluate_every_steps=1", "checkpoint_keep=1")
    with trained(prepared, *settings) as trainable:
        saver = CheckpointSaver(tmp_path, trainable, IDENTITY)
        found = []
        for step, value in enumerate(values):
            found.append(saver.is_best({metric: value}))
            saver.save(at(step), {metric: value})
        saver.save(at(9))
        saver.wait()
    assert found == [True, True, False, False]  # an equal one is not better
    assert steps_in(tmp_path) == [1, 9]
    assert best_checkpoint(tmp_path, metric) == (tmp_path / "step-000000001", values[1])  # type: ignore[arg-type]


def test_an_evaluation_of_saved_weights_is_added(prepared: Path, tmp_path: Path) -> None:
    with trained(prepared) as trainable:
        saver = CheckpointSaver(tmp_path, trainable, IDENTITY)
        path = saver.save(at(3), wait=True)
        evaluated = at(3).model_copy(update={"evaluated_step": 3})
        saver.save(evaluated, {"auc": 0.7})
        record = Record.read(path)
        assert (record.evaluation, record.progress) == ({"auc": 0.7}, evaluated)
        assert load_checkpoint(path, trainable, IDENTITY) == Loaded(evaluated)


def test_a_checkpoint_half_removed_is_none(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trained(prepared) as trainable:
        path = save_checkpoint(tmp_path, trainable)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

            def die(path: Path) -> None:
                (path / ".metadata").unlink()
                raise KeyboardInterrupt

            patch.setattr(shutil, "rmtree", die)
            folder.remove(path)
        assert steps_in(tmp_path) == []
        save_checkpoint(tmp_path, trainable, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000004"]


def test_generators_go_on_where_they_were(prepared: Path, tmp_path: Path) -> None:
    with trained(prepared) as trainable:
        path = save_checkpoint(tmp_path, trainable)
        drawn = torch.rand(5)
        load_checkpoint(path, trainable, IDENTITY)
        assert torch.equal(torch.rand(5), drawn)
