"""A whole run: what it leaves, that it can be cut anywhere, and that ranks do not matter."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score
from support.kernels import require_kernels
from support.ranks import run_ranks
from support.tiny import tiny_config

from recsys_basis.batches.parquet import Columns, ParquetError, RowGroup
from recsys_basis.checkpoints.folder import CheckpointError, Record, list_checkpoints
from recsys_basis.errors import NonFiniteError
from recsys_basis.ingest.errors import DataError
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.kernels.rules import RULES as RULES_IN_CPP
from recsys_basis.metrics.click import OneClassError
from recsys_basis.row_optimizers.sgd import SGD
from recsys_basis.schema import ConfigError
from recsys_basis.training.loop import Run, run_training
from recsys_basis.training.spec import TrainConfig

MIXED = "table_row_optimizers={C3: adam, C1?: adam, C12: sgd}"
SHORT = ("embedding.weight_dtype=bfloat16", "row_optimizer.learning_rate=0.001")
GROWING = ("row_optimizer.rows_per_bucket=20", "row_optimizer.grow_at=[7,30,40]")
RULES = ["basis", "basis_literal", "adam", "partial_rowwise_adam", "rowwise_adagrad", "adagrad", "sgd"]


def logits_of(folder: Path) -> np.ndarray:
    return pq.read_table(folder / "test_predictions.parquet")["logit"].to_numpy()


def test_a_run_leaves_a_folder_that_explains_itself(prepared: Path, tmp_path: Path) -> None:
    config = tiny_config(prepared, tmp_path / "run", "evaluate_every_steps=10", "epochs=2")
    result = run_training(config)
    assert result is not None and result == json.loads((tmp_path / "run" / "result.json").read_text())

    manifest = Manifest.load(prepared)
    assert result["train_rows"] == manifest.splits["train"].num_rows
    assert result["num_rows"] == manifest.splits["test"].num_rows == 800
    assert result["steps"] == 50

    predictions = pq.read_table(tmp_path / "run" / "test_predictions.parquet")
    labels = pq.read_table(prepared / "test")["label"].to_numpy()
    np.testing.assert_array_equal(predictions["label"].to_numpy(), labels)  # every row, in file order
    probability = 1 / (1 + np.exp(-predictions["logit"].to_numpy().astype(np.float64)))
    assert result["auc"] == pytest.approx(roc_auc_score(labels, probability), abs=1e-12)
    assert result["log_loss"] == pytest.approx(log_loss(labels, probability), rel=1e-9)

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(5, 51, 5))
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [10, 20, 30, 40, 50]
    assert lines[-1]["auc"] == result["auc"]
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files >= {"README.md", "config.yaml", "environment.json", "tensorboard", "checkpoints"}
    assert any((tmp_path / "run" / "tensorboard").glob("events.*"))
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["versions"]["torch"] and environment["threads_per_rank"] == 1
    assert environment["cores"] >= 1 and "cpu" in environment
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert 0.3 < min(losses) < max(losses) < 1.2 and result["loss_jitter"] > 0
    assert result["optimizer_bytes"] > 0 and result["peak_memory_bytes"] > 1e8
    assert result["weight_bytes"] >= sum(manifest.cardinalities.values()) * 8 * 4


def test_training_learns(prepared: Path, tmp_path: Path) -> None:
    result = run_training(tiny_config(prepared, tmp_path / "run", "epochs=3"))
    assert result is not None and result["auc"] > 0.65


def test_same_seed_same_run_other_seed_other_run(prepared: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_training(tiny_config(prepared, tmp_path / name, f"seed={seed}"))
    assert np.array_equal(logits_of(tmp_path / "a"), logits_of(tmp_path / "b"))
    assert not np.array_equal(logits_of(tmp_path / "a"), logits_of(tmp_path / "c"))


def prefetching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_batches_made_ahead_change_nothing(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = set()
    original = RowGroup.read

    def read(self: RowGroup) -> Columns:
        readers.add(threading.current_thread() is threading.main_thread())
        return original(self)

    monkeypatch.setattr(RowGroup, "read", read)
    for ahead in (0, 5):
        readers.clear()
        run_training(tiny_config(prepared, tmp_path / str(ahead), f"prefetch_batches={ahead}", "epochs=2"))
        assert readers == {ahead == 0}  # in training and in evaluation
    assert np.array_equal(logits_of(tmp_path / "0"), logits_of(tmp_path / "5"))


class Killed(BaseException):
    """Ends a run as a kill would: nothing catches it."""


def run_until(config: TrainConfig, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Run.step

    def step_or_die(self: Run, *batch: Any) -> float:
        if self.progress.step == step:
            raise Killed
        return original(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", step_or_die)
        with pytest.raises(Killed):
            run_training(config)
    assert not prefetching()


@pytest.mark.parametrize(
    "overrides",
    [
        *((f"row_optimizer={rule}",) for rule in RULES),
        ("tower_average_decay=0.9",),
        (MIXED,),
        GROWING,
        SHORT,
    ],
)
def test_a_killed_run_resumes_bit_for_bit(
    overrides: tuple[str, ...], prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*overrides, "epochs=2", "schedule=linear", "schedule.warmup_steps=7")
    run_training(tiny_config(prepared, tmp_path / "whole", *settings))
    cut = tiny_config(prepared, tmp_path / "cut", *settings, "checkpoint_every_steps=15", "resume=auto")
    run_until(cut, 11, monkeypatch)  # before the first checkpoint
    run_until(cut, 34, monkeypatch)  # in the second epoch, four steps after a checkpoint
    assert list_checkpoints(tmp_path / "cut" / "checkpoints")[-1].name == "step-000000030"
    run_training(cut)
    assert np.array_equal(logits_of(tmp_path / "whole"), logits_of(tmp_path / "cut"))


TWO_RANKS = {
    "basis": ("row_optimizer=basis",),
    "adam": ("row_optimizer=adam",),
    "clipped": ("row_optimizer=basis", "max_gradient_norm=0.05"),
    "growing": ("row_optimizer.rows_per_bucket=20", "row_optimizer.grow_at=[7,20]"),
    "mixed and clipped": (MIXED, "max_gradient_norm=0.05"),
    # 3,200 rows in batches of 3,199: the last batch has one row, and one rank has none.
    "dcnv2 and a rank without rows": (
        "model=dcnv2",
        "model.cross_layers=2",
        "model.cross_rank=8",
        "batch_size=3199",
    ),
}


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_reach_what_one_reaches(case: str, prepared: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    alone = run_training(tiny_config(prepared, one, *TWO_RANKS[case]))
    config = tiny_config(prepared, two, *TWO_RANKS[case], "embedding.sharding=row_wise")
    together, nothing = run_ranks(2, run_training, config)
    assert nothing is None and alone is not None
    # Each rank that holds a shard of a table keeps its step count (8 bytes).
    assert 0 <= together["optimizer_bytes"] - alone["optimizer_bytes"] <= 26 * 8
    assert together["num_rows"] == 800
    np.testing.assert_allclose(logits_of(two), logits_of(one), rtol=1e-3, atol=1e-4)
    if alone["loss_jitter"] is not None:
        assert together["loss_jitter"] == pytest.approx(alone["loss_jitter"], rel=1e-3)
    losses = [
        [json.loads(line).get("loss", 0.0) for line in (folder / "metrics.jsonl").open()][:5]
        for folder in (one, two)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # of the global batch, not of a rank's share


def test_clipping_acts(prepared: Path, tmp_path: Path) -> None:
    for name, settings in (
        ("plain", ()),
        ("loose", ("max_gradient_norm=1e6",)),
        ("tight", ("max_gradient_norm=1e-3",)),
    ):
        run_training(tiny_config(prepared, tmp_path / name, "row_optimizer=sgd", *settings))
    plain, loose, tight = (logits_of(tmp_path / name) for name in ("plain", "loose", "tight"))
    np.testing.assert_allclose(loose, plain, rtol=1e-4, atol=1e-5)
    assert not np.allclose(tight, plain, rtol=1e-2)


def test_fbgemm_kernel_gives_the_same_model(prepared: Path, tmp_path: Path) -> None:
    mixed = "table_row_optimizers={C3: sgd, C1?: sgd}"
    for name, rule in (
        ("rowwise_adagrad", ("row_optimizer=rowwise_adagrad",)),
        ("sgd", ("row_optimizer=sgd",)),
        ("both", ("row_optimizer=rowwise_adagrad", mixed)),
    ):
        for kernel in ("torch", "fbgemm"):
            settings = (*rule, f"embedding.kernel={kernel}")
            run_training(tiny_config(prepared, tmp_path / f"{name}-{kernel}", *settings))
        ours, theirs = (logits_of(tmp_path / f"{name}-{kernel}") for kernel in ("torch", "fbgemm"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "settings, words",
    [
        (("embedding.kernel=fbgemm", "row_optimizer=adam"), "no 'adam' on cpu"),
        (("embedding.kernel=fbgemm", "row_optimizer=basis"), "no 'basis' on cpu"),
        (("embedding.kernel=fbgemm", "row_optimizer=sgd", MIXED), "no 'adam' on cpu"),
        (("+table_row_optimizers.C27=adam",), "table_row_optimizers.C27 names no table"),
        (("embedding.kernel=fbgemm", "row_optimizer=sgd", "max_gradient_norm=1.0"), "max_gradient_norm"),
        (
            ("embedding.kernel=fbgemm", "row_optimizer=sgd", "embedding.weight_dtype=float16"),
            "embedding.weight_dtype = float16 with embedding.kernel = fbgemm",
        ),
        (("row_optimizer.grow_at=[3,25]",), r"grow_at = \[3, 25\].* 25 steps"),
        (("model.dense_arch=[16,4]",), "embedding_dim = 8"),
        (("model.over_arch=[16,2]",), "model.over_arch"),
        (("model.cross_layers=1",), "cross_layers"),
        (("holdout_fraction=0.00001",), "holdout_fraction"),
        (("runtime.device=cuda",), "runtime.device"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: tuple[str, ...], words: str, prepared: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_training(tiny_config(prepared, tmp_path / "run", *settings))
    assert not (tmp_path / "run").exists()


def test_auto_takes_a_kernel_for_each_rule_and_says_so(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_kernels()
    monkeypatch.delitem(RULES_IN_CPP, SGD)
    settings = ("row_optimizer=adam", "+table_row_optimizers.C3=sgd")
    run_training(tiny_config(prepared, tmp_path / "run", *settings))
    words = capsys.readouterr().out
    assert (
        "auto: the C++ kernels" in words and "auto: plain PyTorch, since row_optimizer.rule = 'sgd'" in words
    )
    with pytest.raises(ConfigError, match=r"row_optimizer\.rule = 'sgd' has no C\+\+ kernel"):
        run_training(tiny_config(prepared, tmp_path / "other", *settings, "embedding.kernel=cpp"))


def test_dcnv2_and_mean_pooling_train(prepared: Path, tmp_path: Path) -> None:
    settings = ("model=dcnv2", "model.cross_layers=2", "model.cross_rank=8", "embedding.pooling=mean")
    result = run_training(tiny_config(prepared, tmp_path / "run", *settings))
    assert result is not None and 0.5 < result["auc"] < 1


def test_holdout_keeps_test_rows_out(prepared: Path, tmp_path: Path) -> None:
    result = run_training(tiny_config(prepared, tmp_path / "run", "holdout_fraction=0.25"))
    assert result is not None and result["evaluated_on"] == "holdout"
    assert (result["train_rows"], result["num_rows"]) == (2400, 800)
    labels = pq.read_table(prepared / "train")["label"].to_numpy()[2400:]
    predictions = pq.read_table(tmp_path / "run" / "test_predictions.parquet")
    np.testing.assert_array_equal(predictions["label"].to_numpy(), labels)


def test_divergence_names_the_step_and_keeps_the_last_good_checkpoint(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (
        "row_optimizer=sgd",
        "row_optimizer.learning_rate=0.01",
        "checkpoint_every_steps=1",
        "resume=auto",
    )
    run_until(tiny_config(prepared, tmp_path / "run", *good), 6, monkeypatch)
    wild = (*good, "row_optimizer.learning_rate=1e30")
    with pytest.raises(NonFiniteError, match=r"step \d+.*last good checkpoint is .*step-00000000"):
        run_training(tiny_config(prepared, tmp_path / "run", *wild))
    assert not (tmp_path / "run" / "result.json").exists()
    result = run_training(tiny_config(prepared, tmp_path / "run", *good))
    assert result is not None and result["steps"] == 25


def test_divergence_in_the_last_step_saves_nothing(prepared: Path, tmp_path: Path) -> None:
    settings = ("row_optimizer=sgd", "row_optimizer.learning_rate=1e38", "batch_size=3200")
    with pytest.raises(NonFiniteError):
        run_training(tiny_config(prepared, tmp_path / "run", *settings))
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize(
    "change",
    [
        "batch_size=64",
        "seed=7",
        "shuffle_window=2",
        "holdout_fraction=0.1",
        "model.over_arch=[8,1]",
        "dense_optimizer.beta1=0.5",
    ],
)
def test_resume_refuses_a_run_that_is_another(
    change: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("checkpoint_every_steps=5", "resume=auto")
    run_until(tiny_config(prepared, tmp_path / "run", *settings), 7, monkeypatch)
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    with pytest.raises(CheckpointError, match=change.split("=")[0]):
        run_training(tiny_config(prepared, tmp_path / "run", *settings, change))
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before


def test_a_resumed_run_logs_each_step_once(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(prepared, tmp_path / "run", "checkpoint_every_steps=10", "resume=auto")
    run_until(config, 19, monkeypatch)
    for log in ("metrics.jsonl", "diagnostics.jsonl"):
        with (tmp_path / "run" / log).open("a") as file:
            file.write('{"step": 1')  # killed in the middle of a line
    run_training(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [5, 10, 15, 20, 25]


def test_prepared_data_is_held_to_its_manifest(prepared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "prepared"
    shutil.copytree(prepared, copy)
    shutil.copy(copy / "train" / "part-00000.parquet", copy / "train" / "part-00001.parquet")  # a stray file
    result = run_training(tiny_config(copy, tmp_path / "run"))
    assert result is not None and result["train_rows"] == 3200
    part = copy / "test" / "part-00000.parquet"
    pq.write_table(pq.read_table(part).slice(0, 300), part)
    with pytest.raises(DataError, match=r"test/part-00000\.parquet is .*not the file"):
        run_training(tiny_config(copy, tmp_path / "again"))
    part.unlink()
    with pytest.raises(DataError, match=r"test/part-00000\.parquet is missing"):
        run_training(tiny_config(copy, tmp_path / "again"))


def test_dataset_settings_must_be_those_of_the_data(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="min_count was 2, the config says 10"):
        run_training(tiny_config(prepared, tmp_path / "run", "dataset.min_count=10"))


def test_warm_up_that_never_ends_is_refused(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.warmup_steps = 25"):
        run_training(tiny_config(prepared, tmp_path / "run", "schedule.warmup_steps=25"))


def test_a_used_folder_is_not_overwritten(prepared: Path, tmp_path: Path) -> None:
    config = tiny_config(prepared, tmp_path / "run")
    run_training(config)
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="not empty"):
        run_training(config)
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_one_class_evaluation_says_so(prepared: Path, tmp_path: Path) -> None:
    labels = pq.read_table(prepared / "train")["label"].to_numpy()
    assert len(labels) == 3200
    fraction = 1 / len(labels)  # the last row alone
    with pytest.raises(OneClassError, match="label"):
        run_training(tiny_config(prepared, tmp_path / "run", f"holdout_fraction={fraction}"))


def refusal(config: TrainConfig) -> str:
    try:
        run_training(config)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_a_used_folder_is_refused_on_every_rank(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("someone's")
    answers = run_ranks(2, refusal, tiny_config(prepared, tmp_path))
    assert all("not empty" in answer for answer in answers)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def vanish(part: Path) -> None:
    part.unlink()


def cut(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-100])


def shrink(part: Path) -> None:
    """Whole again, with fewer rows in each row group."""
    pq.write_table(pq.read_table(part), part, row_group_size=400)


@pytest.mark.parametrize("damage", [vanish, cut, shrink])
def test_data_that_changes_during_training_is_named(
    damage: Callable[[Path], None], prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "prepared"
    shutil.copytree(prepared, copy)
    part, original = copy / "train" / "part-00000.parquet", Run.step

    def step(self: Run, *batch: Any) -> float:
        if self.progress.step == 5:
            damage(part)
        return original(self, *batch)

    monkeypatch.setattr(Run, "step", step)
    settings = ("checkpoint_every_steps=4", "resume=auto", "prefetch_batches=2")  # the rest is read later
    config = tiny_config(copy, tmp_path / "run", *settings)
    with pytest.raises(ParquetError, match=rf"{part}: row group \d+ .*prepare"):
        run_training(config)
    assert not prefetching()
    monkeypatch.undo()
    shutil.copy(prepared / "train" / "part-00000.parquet", part)
    result = run_training(config)  # from the checkpoint before
    assert result is not None and result["steps"] == 25


def test_the_best_evaluated_weights_stay(prepared: Path, tmp_path: Path) -> None:
    settings = ("evaluate_every_steps=10", "checkpoint_best_by=log_loss", "checkpoint_keep=1", "epochs=2")
    # So fast that the last weights are not the best.
    wild = ("row_optimizer.learning_rate=0.5", "dense_optimizer.learning_rate=0.05")
    run_training(tiny_config(prepared, tmp_path / "run", *settings, *wild))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["log_loss"] for line in lines if line["kind"] == "evaluation"}
    best = min(losses, key=lambda step: losses[step])
    assert list(losses) == [10, 20, 30, 40, 50] and best < 50
    kept = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in kept] == [f"step-{best:09d}", "step-000000050"]
    record = Record.read(kept[0])
    assert record.evaluation is not None and record.evaluation["log_loss"] == losses[best]


def test_a_checkpoint_keeps_the_evaluation_of_its_weights(prepared: Path, tmp_path: Path) -> None:
    every_ten = ("evaluate_every_steps=10", "checkpoint_every_steps=5", "checkpoint_keep=9")
    run_training(tiny_config(prepared, tmp_path / "run", *every_ten))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = {line["step"]: line["auc"] for line in lines if line["kind"] == "evaluation"}
    assert list(expected) == [10, 20, 25]
    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        record = Record.read(path)
        found = record.evaluation["auc"] if record.evaluation else None
        assert found == expected.get(record.progress.step)


def test_powersgd_says_what_it_does_not_resume(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("communication.towers=powersgd", "resume=auto")
    run_training(tiny_config(prepared, tmp_path / "run", *settings))
    assert "powersgd" not in capsys.readouterr().out
    run_training(tiny_config(prepared, tmp_path / "run", *settings))
    assert "powersgd begins anew: whole gradients for its first 1000 steps" in capsys.readouterr().out


def test_a_run_begins_from_a_checkpoint_that_resume_names(prepared: Path, tmp_path: Path) -> None:
    run_training(tiny_config(prepared, tmp_path / "whole", "checkpoint_every_steps=15"))
    path = list_checkpoints(tmp_path / "whole" / "checkpoints")[0]
    assert path.name == "step-000000015"
    config = tiny_config(prepared, tmp_path / "other", f"resume={path}")
    run_training(config)
    assert np.array_equal(logits_of(tmp_path / "whole"), logits_of(tmp_path / "other"))
    shutil.rmtree(path)  # as torchrun restarts it: from its own checkpoint, no longer from that one
    again = tiny_config(prepared, tmp_path / "other", f"resume={path}/")
    assert run_training(again) is not None
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    with pytest.raises(ConfigError, match=r"resume = .*step-000000015"):
        tiny_config(prepared, tmp_path / "other", f"resume={path}")
    (tmp_path / "another").mkdir()
    with pytest.raises(ConfigError, match="not empty"):
        run_training(config.model_copy(update={"resume": str(tmp_path / "another")}))


def test_a_folder_that_cannot_be_written_is_named(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir = .*file/run cannot be written \(.*Not a directory"):
        run_training(tiny_config(prepared, tmp_path / "file" / "run"))
