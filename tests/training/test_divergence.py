"""What is wrong on one rank alone ends all ranks, at one step, with the same words."""

from __future__ import annotations

import itertools
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import tiny_config

from recsys_basis.checkpoints.folder import list_checkpoints
from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.features import RowGradients
from recsys_basis.errors import UserError
from recsys_basis.training import loop
from recsys_basis.training.loop import run_training
from recsys_basis.training.runtime import start_runtime
from recsys_basis.training.spec import TrainConfig

ONE_RANK = 1
LAST_STEP = 24


def spoil_loss(step: int) -> mock._patch:
    """Infinite at ``step``, with finite gradients."""
    original, calls = loop.F.binary_cross_entropy_with_logits, itertools.count()

    def loss(*arguments: torch.Tensor, reduction: str) -> torch.Tensor:
        infinite = math.inf if next(calls) == step else 0.0
        return original(*arguments, reduction=reduction) + infinite

    return mock.patch.object(loop.F, "binary_cross_entropy_with_logits", loss)


def spoil_rows(step: int) -> mock._patch:
    """Gradients of rows, at ``step``, after a loss that was finite."""
    original, calls = RowOptimizedEmbeddingBags.receive, itertools.count()

    def receive(self: RowOptimizedEmbeddingBags, gradients: RowGradients) -> None:
        if next(calls) == step:
            gradients = replace(gradients, summed=gradients.sums * math.inf, finite=False)
        original(self, gradients)

    return mock.patch.object(RowOptimizedEmbeddingBags, "receive", receive)


def nothing(step: int) -> mock._patch:
    return mock.patch.object(loop, "WARMUP_STEPS", loop.WARMUP_STEPS)


def words_of(configs: dict[str, TrainConfig]) -> dict[str, str]:
    """With which each run ends on this rank, all in one process group."""
    words = {}
    with start_runtime(configs["loss"].runtime) as runtime:
        for name, config in configs.items():
            spoil, step = CASES[name]
            with (
                mock.patch.object(loop, "start_runtime", lambda _: nullcontext(runtime)),
                spoil(step) if runtime.rank == ONE_RANK else nothing(step),
            ):
                try:
                    run_training(config)
                except UserError as error:
                    words[name] = f"{type(error).__name__}: {error}"
    return words


CASES = {
    "loss": (spoil_loss, 7),
    "rows": (spoil_rows, 6),
    "rows of the last step": (spoil_rows, LAST_STEP),
    "replicated rows": (spoil_rows, 6),
    "clicks alone": (nothing, 0),
}


@pytest.fixture(scope="module")
def ended(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("runs")
    settings = ("checkpoint_every_steps=7", "checkpoint_asynchronous=false", "embedding.sharding=table_wise")
    configs = {name: tiny_config(prepared, folder / name, *settings) for name in CASES}
    replicated = ("checkpoint_every_steps=7", "embedding.sharding=data_parallel")
    configs["replicated rows"] = tiny_config(prepared, folder / "replicated rows", *replicated)
    last_row = f"holdout_fraction={1 / 3200}"  # the one evaluated, so the main rank finds no AUC
    configs["clicks alone"] = tiny_config(prepared, folder / "clicks alone", last_row)
    return folder, run_ranks(2, words_of, configs)


@pytest.mark.parametrize(
    ("case", "beginning", "newest"),
    [
        ("loss", r"NonFiniteError: step 7: the loss is inf; lower the learning rates\. No checkpoint", None),
        ("rows", r"NonFiniteError: step 6: table C\d+: non-finite gradient; lower", None),
        ("rows of the last step", r"NonFiniteError: step 24: table C\d+: non-finite gradient; lower", 21),
        ("replicated rows", r"NonFiniteError: step 6: table C\d+: non-finite gradient; lower", None),
        ("clicks alone", "OneClassError: ", None),
    ],
)
def test_all_ranks_say_the_same(
    case: str, beginning: str, newest: int | None, ended: tuple[Path, list[dict[str, str]]]
) -> None:
    folder, words = ended
    assert words[0][case] == words[1][case]
    assert re.match(beginning, words[0][case]), words[0][case]
    saved = [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder / case / "checkpoints")]
    assert max(saved, default=None) == newest
