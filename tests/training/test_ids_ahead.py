"""Ids sent while earlier batches train (communication.ids_ahead) change no bit, wherever a run is cut."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.ranks import run_ranks
from support.tiny import tiny_config

from recsys_basis.checkpoints.folder import Record, list_checkpoints
from recsys_basis.embeddings.sending import SentIds
from recsys_basis.embeddings.sharder import StripedEmbeddingBagCollection
from recsys_basis.training.loop import run_training
from recsys_basis.training.spec import TrainConfig

SETTINGS = (
    "resume=auto",
    "epochs=2",
    "batch_size=320",
    "evaluate_every_steps=4",
    "checkpoint_every_steps=3",
)
SHARDINGS = (
    "embedding.sharding=row_wise",
    "embedding.table_sharding={C2?: table_wise, C12: table_row_wise, C3: data_parallel, C4: column_wise}",
)


def train_plain_and_cut(plain: TrainConfig, ahead: TrainConfig) -> None:
    """Also ``ahead``, which the last rank stops in its second epoch and which is resumed."""
    calls = itertools.count()
    asks = os.environ.get("RANK") in (None, "1")
    run_training(plain)
    assert run_training(ahead, stop_asked=lambda: asks and next(calls) >= 17) is None
    (*_, stopped) = list_checkpoints(Path(ahead.output_dir) / "checkpoints")
    progress = Record.read(stopped).progress
    assert progress.epoch == 1 and 0 < progress.batch < 9 and progress.step == 10 + progress.batch
    run_training(ahead)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_bits_as_without(ranks: int, prepared: Path, tmp_path: Path) -> None:
    plain, ahead = (
        tiny_config(prepared, tmp_path / value, *SETTINGS, *SHARDINGS, f"communication.ids_ahead={value}")
        for value in ("false", "true")
    )
    if ranks == 1:
        train_plain_and_cut(plain, ahead)
    else:
        run_ranks(ranks, train_plain_and_cut, plain, ahead)
    logits = [pq.read_table(tmp_path / value / "test_predictions.parquet") for value in ("false", "true")]
    assert logits[0].equals(logits[1])


def test_training_sends_ahead_and_evaluation_does_not(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, sent = StripedEmbeddingBagCollection.forward, {True: set(), False: set()}

    def forward(self: StripedEmbeddingBagCollection, features: Any) -> Any:
        sent[self.training].add(isinstance(features, SentIds))
        return original(self, features)

    monkeypatch.setattr(StripedEmbeddingBagCollection, "forward", forward)
    for value in ("true", "false"):
        settings = ("evaluate_every_steps=10", f"communication.ids_ahead={value}")
        run_training(tiny_config(prepared, tmp_path / value, *settings))
        assert sent == {True: {value == "true"}, False: {False}}
        sent[True].clear()
