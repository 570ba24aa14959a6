"""Dense optimizers train a job of this package, and go on from its checkpoint bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.tiny import tiny_config

from recsys_basis.training.loop import Run, run_training

VARIANTS = {
    "adamw, two groups": ["dense_optimizer=adamw", "dense_optimizer.weight_decay=0.1"],
    "sm3": ["dense_optimizer=sm3", "dense_optimizer.bfloat16_momentum=true"],
    "balanced_adam, masks": [
        "dense_optimizer=balanced_adam",
        "dense_optimizer.groups=cluster",
        "dense_optimizer.statistics=freeze",
    ],
    "balanced_adam, rebalancing": [
        "dense_optimizer=balanced_adam",
        "dense_optimizer.early_steps=5",
        "dense_optimizer.rebalancing=true",
        "dense_optimizer.rebalance_start=6",
        "dense_optimizer.rebalance_window=3",
    ],
    "adafactor": ["dense_optimizer=adafactor"],
    "sgd": ["dense_optimizer=sgd", "dense_optimizer.momentum=0.0"],
}


class Killed(BaseException):
    """Ends a run as a kill would: nothing catches it."""


def test_a_run_says_what_auto_takes_for_its_towers(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, choice in (
        ("balanced", ["dense_optimizer=balanced_adam"]),
        ("asked", ["dense_optimizer=balanced_adam", "dense_optimizer.kernel=torch"]),
        ("adamw", ["dense_optimizer=adamw"]),
    ):
        run_training(tiny_config(prepared, tmp_path / name, *choice, "max_train_rows=300"))
        said = "dense_optimizer.kernel = auto: " in capsys.readouterr().out
        assert said == (name == "balanced"), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_in_two_parts_is_the_run(
    variant: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 25 steps, the second part starts from the checkpoint of step 12."""
    settings = VARIANTS[variant]
    result = run_training(tiny_config(prepared, tmp_path / "whole", *settings))
    assert result is not None
    assert result["log_loss"] < 0.7

    original = Run.step

    def step_or_die(self: Run, *batch: Any) -> float:
        if self.progress.step == 13:
            raise Killed
        return original(self, *batch)

    cut = tiny_config(prepared, tmp_path / "cut", *settings, "checkpoint_every_steps=12", "resume=auto")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Run, "step", step_or_die)
        run_training(cut)
    run_training(cut)
    logits = [
        pq.read_table(tmp_path / name / "test_predictions.parquet")["logit"].to_numpy()
        for name in ("whole", "cut")
    ]
    assert np.array_equal(*logits)
