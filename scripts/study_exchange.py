"""What a cheaper exchange between ranks costs in AUC, on one rank that does to the numbers what it would.

    python scripts/study_exchange.py late --seeds 5 --output runs/late
    python scripts/study_exchange.py fp16 bf16 --rules basis,adam --seeds 5 --output runs/narrow

late: rows are updated one step late, as in TorchRec's semi-synchronous pipeline, where the lookup of batch
t + 1 runs before the update of batch t, so that exchange and lookup hide behind the step before. Towers are
never late.

fp16, bf16: pooled vectors and their gradients go through the codecs of communication.embeddings, as between
ranks of GPUs with whole tables (row-wise ones add up partial sums in the narrow type besides).

Each row optimizer trains as it does and with each of these, at each of three rates about the one that the
comparison of the shelf found, on the last eighth of the training rows; then with every seed on all of them
at the best rate, judged on test rows. A finished run is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torchrec.distributed.types import CommOp

from recsys_basis.comparing.runs import PlannedRun
from recsys_basis.config import compose_job
from recsys_basis.embeddings import kernel
from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.features import RowGradients
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.report.comparison import Judging, compare_runs
from recsys_basis.report.table import print_comparison
from recsys_basis.schema import parse_section
from recsys_basis.training.communication import CommunicationConfig, embedding_codecs
from recsys_basis.training.loop import run_training
from recsys_basis.training.spec import TrainConfig

RATES = {"basis": 0.002, "adam": 0.002, "rowwise_adagrad": 0.04}


class LateBags(RowOptimizedEmbeddingBags):
    """Backward of batch t + 1 applies the update of batch t; the last one is never applied."""

    waiting: RowGradients | None = None

    def receive(self, gradients: RowGradients) -> None:
        gradients, self.waiting = self.waiting, gradients  # type: ignore[assignment]
        if gradients is not None:
            super().receive(gradients)


class NarrowBags(RowOptimizedEmbeddingBags):
    """Pooled vectors arrive, and their gradients return, in fewer bits."""

    codecs: Any

    def forward(self, *inputs: Any) -> torch.Tensor:
        return SentNarrow.apply(super().forward(*inputs), self.codecs)


class SentNarrow(torch.autograd.Function):
    """Encoded and decoded on either way."""

    @staticmethod
    def forward(context: Any, pooled: torch.Tensor, codecs: Any) -> torch.Tensor:
        context.codecs = codecs
        return there(codecs.forward, pooled)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return there(context.codecs.backward, gradients[0]), None


def there(codec: Any, numbers: torch.Tensor) -> torch.Tensor:
    """What arrives of ``numbers``."""
    context = codec.create_context()
    return codec.decode(codec.encode(numbers, context), context)


def narrow_bags(precision: Literal["fp16", "bf16"], batch_size: int) -> type[RowOptimizedEmbeddingBags]:
    """``NarrowBags`` that send as GPUs with these batches do."""
    settings = CommunicationConfig(
        embeddings=precision, towers="fp32", powersgd_rank=1, powersgd_start_step=2
    )
    codecs = embedding_codecs(settings, batch_size, torch.device("cuda"))
    assert codecs is not None
    return type("NarrowBags", (NarrowBags,), {"codecs": codecs[CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name]})


KINDS: dict[str, Callable[[int], type[RowOptimizedEmbeddingBags]]] = {
    "late": lambda batch_size: LateBags,
    "fp16": lambda batch_size: narrow_bags("fp16", batch_size),
    "bf16": lambda batch_size: narrow_bags("bf16", batch_size),
}


@contextmanager
def models_with(bags: type[RowOptimizedEmbeddingBags]) -> Iterator[None]:
    """Inside, models are built with ``bags``."""
    usual = kernel.RowOptimizedEmbeddingBags
    kernel.RowOptimizedEmbeddingBags = bags  # type: ignore[misc]
    try:
        yield
    finally:
        kernel.RowOptimizedEmbeddingBags = usual  # type: ignore[misc]


def train(variant: str, rate: float, seed: int, output: Path, *settings: str) -> PlannedRun:
    """One run of ``variant``, RULE or RULE_KIND, on one thread, unless its folder has it; judged on the last
    eighth of the training rows where ``settings`` say so."""
    rule, kind = rule_and_kind(variant)
    name = "-".join([variant, f"{rate:g}", str(seed), *(["search"] if settings else [])])
    values = compose_job(
        "train",
        [
            "experiment=kaggle_137k",
            f"row_optimizer={rule}",
            f"row_optimizer.learning_rate={rate}",
            f"seed={seed}",
            "diagnostics_every_steps=null",
            "runtime.device=cpu",
            "runtime.threads_per_rank=1",
            f"output_dir={output / name}",
            *settings,
        ],
    )
    config = parse_section(TrainConfig, values)
    run = PlannedRun(variant, config, rate, Manifest.load(config.dataset.prepared_dir).digest())
    if not run.is_finished():
        bags = KINDS[kind](config.batch_size) if kind else RowOptimizedEmbeddingBags
        with models_with(bags):
            run_training(config, on_rows=lambda rows: None)
    return run


def rule_and_kind(variant: str) -> tuple[str, str]:
    """Parts of RULE or RULE_KIND."""
    rule, _, kind = variant.rpartition("_")
    return (rule, kind) if kind in KINDS else (variant, "")


def best_rate(variant: str, output: Path) -> float:
    """Of half, once and twice the shelf's rate, by AUC on rows held out."""
    usual = RATES[rule_and_kind(variant)[0]]

    def auc(rate: float) -> float:
        run = train(variant, rate, 0, output, "holdout_fraction=0.125")
        found: dict[str, Any] = json.loads((run.folder / "result.json").read_text())
        return float(found["auc"])

    return max((usual / 2, usual, usual * 2), key=auc)


def main() -> None:
    """Search, train, and print a table for each row optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=list(KINDS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rules", default=",".join(RATES), help="row optimizers, separated by commas")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    for rule in options.rules.split(","):
        variants = [rule, *(f"{rule}_{kind}" for kind in options.kinds)]
        rates = {variant: best_rate(variant, options.output) for variant in variants}
        runs = [
            train(variant, rates[variant], seed, options.output)
            for seed in range(options.seeds)
            for variant in variants
        ]
        judging = Judging(baseline=rule, margin=0.0005, num_resamples=2000)
        rows = compare_runs([run.record() for run in runs], judging)
        print_comparison(rows, f"{rule}, {options.seeds} seeds", rule)


if __name__ == "__main__":
    main()
