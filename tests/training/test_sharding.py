"""Training and checkpoints under every sharding that ranks allow: what moves, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_config
from support.trained import IDENTITY, save_checkpoint

from recsys_basis.checkpoints.folder import CheckpointError
from recsys_basis.checkpoints.load import load_checkpoint
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.schema import ConfigError
from recsys_basis.training.build import Trainable, build
from recsys_basis.training.loop import run_training
from recsys_basis.training.runtime import start_runtime

COLUMNS = ("embedding.sharding=column_wise", "embedding.column_shards=2")


def with_model(prepared: Path, *overrides: str, then: Any) -> Any:
    config = tiny_config(prepared, Path("unused"), *overrides)
    with start_runtime(config.runtime) as runtime:
        return then(build(config, Manifest.load(prepared), runtime))


def whole_state(trainable: Trainable) -> dict[str, torch.Tensor]:
    """Of one rank: the parts of each tensor in their places."""
    entries = {key: value for key, value in trainable.model.state_dict().items() if "embedding_bags" in key}
    for state in trainable.row_optimizer.state_dict()["state"].values():
        entries |= state
    return {key: whole(value) for key, value in entries.items()}


def whole(value: Any) -> torch.Tensor:
    if not hasattr(value, "local_shards"):
        return value.detach().clone()
    full = torch.empty(value.size(), dtype=value.dtype)
    for shard in value.local_shards():
        starts, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        full[tuple(slice(o, o + n) for o, n in zip(starts, sizes, strict=True))] = shard.tensor
    return full


def moved(
    prepared: Path, folder: Path, rule: str, source: tuple[str, ...], target: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What was saved under ``source``, and what a model under ``target`` holds after loading it."""
    rows = f"row_optimizer={rule}"

    def fill_and_save(trainable: Trainable) -> dict[str, torch.Tensor]:
        for bags in trainable.embedding_bags():
            for number, part in enumerate(bags.row_optimizer.table_states()):
                if part.per != "table":
                    part.tensor.copy_(torch.rand(part.tensor.shape) + number)
                else:
                    part.tensor.fill_(17)
        save_checkpoint(folder, trainable, step=1)
        return whole_state(trainable)

    def load(trainable: Trainable) -> dict[str, torch.Tensor]:
        load_checkpoint(folder / "step-000000001", trainable, IDENTITY)
        trainable.start_step(1, 2)  # as before the next forward pass
        for bags in trainable.embedding_bags():
            for part in bags.row_optimizer.table_states():
                assert part.per != "table" or (part.tensor == 17).all()
        return whole_state(trainable)

    return with_model(prepared, rows, *source, then=fill_and_save), with_model(
        prepared, rows, *target, then=load
    )


@pytest.mark.parametrize(
    ("rule", "source", "target"),
    [
        ("adam", (), COLUMNS),
        ("adam", COLUMNS, ()),
        ("basis", COLUMNS, COLUMNS),
        ("basis", ("embedding.sharding=data_parallel",), ()),
        ("partial_rowwise_adam", (), ("embedding.sharding=data_parallel",)),
    ],
)
def test_a_checkpoint_moves_between_shardings_exactly(
    rule: str, source: tuple[str, ...], target: tuple[str, ...], prepared: Path, tmp_path: Path
) -> None:
    saved, loaded = moved(prepared, tmp_path, rule, source, target)
    assert saved.keys() == loaded.keys()
    for key, value in saved.items():
        assert torch.equal(loaded[key], value), key


@pytest.mark.parametrize(("source", "target"), [((), COLUMNS), (COLUMNS, ())])
def test_numbers_of_rows_do_not_move_between_blocks_of_columns(
    source: tuple[str, ...], target: tuple[str, ...], prepared: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"tables\.C1\.column_blocks = (2|None), this run has (2|None)"):
        moved(prepared, tmp_path, "rowwise_adagrad", source, target)


def test_a_state_budget_over_blocks_of_columns_is_refused(prepared: Path, tmp_path: Path) -> None:
    budget = ("row_optimizer.rows_per_bucket=null", "row_optimizer.state_budget=50%")
    with pytest.raises(ConfigError, match="table C1 is cut into 2 blocks"):
        run_training(tiny_config(prepared, tmp_path, *COLUMNS, *budget))


@pytest.mark.parametrize("sharding", [COLUMNS, ("embedding.sharding=data_parallel",)])
def test_a_run_trains_and_saves_and_says_nothing_that_nobody_can_mend(
    sharding: tuple[str, ...], prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = run_training(tiny_config(prepared, tmp_path, *sharding))
    assert result is not None and result["auc"] > 0.5
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_replicas_are_refused_where_they_would_be_wrong(prepared: Path) -> None:
    for override, reason in (
        ("max_gradient_norm=1.0", "once for each rank"),
        ("embedding.kernel=fbgemm", "not average gradients"),
    ):
        replicated = ("embedding.sharding=data_parallel", "row_optimizer=rowwise_adagrad", override)
        with pytest.raises(ConfigError, match=reason):
            with_model(prepared, *replicated, then=lambda trainable: None)
