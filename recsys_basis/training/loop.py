"""One training run, from its config to result.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from recsys_basis.batches.batch import Batch
from recsys_basis.batches.parquet import RowGroup
from recsys_basis.batches.prefetch import prefetch
from recsys_basis.batches.stream import BatchStream, Shuffle
from recsys_basis.diagnostics.recorder import Diagnostics
from recsys_basis.embeddings.choice import describe_choice
from recsys_basis.errors import NonFiniteError
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.metrics.jitter import JITTER_STEPS, loss_jitter
from recsys_basis.metrics.resources import RowMeter
from recsys_basis.schema import ConfigError
from recsys_basis.training.build import Trainable, build
from recsys_basis.training.checkpoint import Progress, list_checkpoints, load_checkpoint, save_checkpoint
from recsys_basis.training.clipping import clip_gradients
from recsys_basis.training.costs import measure_costs
from recsys_basis.training.data import open_row_groups
from recsys_basis.training.evaluation import Evaluation, evaluate
from recsys_basis.training.quiet import silence_known_warnings
from recsys_basis.training.run_folder import RunFolder, refuse_used_folder
from recsys_basis.training.runtime import Runtime, start_runtime
from recsys_basis.training.spec import TrainConfig


def run_training(
    config: TrainConfig, on_rows: Callable[[int], object] | None = None
) -> dict[str, Any] | None:
    """Train, evaluate and save; returns what result.json holds (None on all but the main rank).

    ``on_rows`` is called with the rows of each step, in place of progress bars and words.
    """
    silence_known_warnings()
    with start_runtime(config.runtime) as runtime:
        refuse_used_folder(config, runtime)
        manifest = Manifest.load(Path(config.dataset.prepared_dir))
        train_groups, evaluation_groups = open_row_groups(config, manifest)
        trainable = build(config, manifest, runtime)
        folder = RunFolder(config, runtime)
        run = Run(config, runtime, trainable, folder, manifest, train_groups, evaluation_groups, on_rows)
        run.resume()
        run.train()
        return run.finish()


WARMUP_STEPS = 10
"""First steps pay for allocation and caches: rows a second are counted after them."""


@dataclass
class Run:
    """State of one run on one rank."""

    config: TrainConfig
    runtime: Runtime
    trainable: Trainable
    folder: RunFolder
    manifest: Manifest
    train_groups: list[RowGroup]
    evaluation_groups: list[RowGroup]
    on_rows: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        self.progress = Progress(step=0, epoch=0, batch=0)
        self.early_losses: list[float] = []
        """This rank's shares of the losses of the first steps; short where the run was resumed."""
        self.num_steps = self._stream(0).num_batches * self.config.epochs
        if self.config.schedule.warmup_steps >= self.num_steps:
            raise ConfigError(
                f"schedule.warmup_steps = {self.config.schedule.warmup_steps} would not end within the "
                f"{self.num_steps} steps of this run"
            )
        self.speed = RowMeter(WARMUP_STEPS)
        self.diagnostics = Diagnostics(self.trainable.embedding_bags(), self.config.diagnostics_every_steps)

    def resume(self) -> None:
        """With resume=auto, continue from the newest checkpoint of this run's folder, if it has one."""
        checkpoints = list_checkpoints(self.folder.checkpoints)
        if self.config.resume == "auto" and checkpoints:
            self.progress = load_checkpoint(checkpoints[-1], self.trainable, self._identity())
            self._say(f"resumed from {checkpoints[-1]} at step {self.progress.step}")
        self.folder.start(self.progress.step)
        if self.config.embedding.kernel == "auto":
            self._say(describe_choice(self.config.row_optimizer, self.runtime.device.type))
        self._say(
            f"training on {self.runtime.device}, {self.runtime.world_size} rank(s) of "
            f"{self.runtime.threads} thread(s), {self.num_steps:,} steps"
        )

    def train(self) -> None:
        """All remaining steps of all epochs, with evaluations and checkpoints at their intervals."""
        while self.progress.epoch < self.config.epochs:
            stream = self._stream(self.progress.epoch, self.progress.batch)
            title = f"epoch {self.progress.epoch + 1}/{self.config.epochs}"
            done = min(stream.start_batch * stream.batch_size, stream.num_rows)
            batches = prefetch(stream, self.config.prefetch_batches)
            with self._bar(title, stream.num_rows, done) as bar, closing(batches):
                for batch in batches:
                    loss = self.step(batch.to(self.runtime.device))
                    self._advance(batch, loss, bar)
            self.progress = Progress(step=self.progress.step, epoch=self.progress.epoch + 1, batch=0)

    def step(self, batch: Batch) -> float:
        """Forward, backward with the rows' update inside, the towers' update; this rank's loss share."""
        step = self.progress.step
        self.trainable.start_step(step, self.num_steps)
        logits = self.trainable.model(batch.dense, batch.sparse).squeeze(1)
        losses = F.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
        # Ranks may hold shares of different size; DDP and TorchRec both average over ranks, so this
        # makes every gradient the mean over the global batch.
        loss = losses * self.runtime.world_size / batch.global_rows
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"step {step}: the loss is {float(loss.detach())}; lower the learning rates. {self._kept()}"
            )
        # A checkpoint is due only now, when a forward pass has shown that its weights are sound.
        if self._due(self.config.checkpoint_every_steps):
            self._save()
        self.diagnostics.watch(step + 1, self.num_steps)
        try:
            loss.backward()
            if self.config.max_gradient_norm is not None:
                clip_gradients(
                    self.trainable.dense_parameters(),
                    self.trainable.embedding_bags(),
                    self.config.max_gradient_norm,
                )
        except NonFiniteError as error:
            raise NonFiniteError(f"step {step}: {error}; lower the learning rates. {self._kept()}") from error
        self.trainable.finish_step()
        report = self.diagnostics.report()
        if report is not None:
            self.folder.log_diagnostics(step + 1, report)
        return float(loss.detach()) / self.runtime.world_size

    def finish(self) -> dict[str, Any] | None:
        """Evaluation of every row, last checkpoint, result.json."""
        evaluation = self.evaluate()
        self._save()
        costs = measure_costs(self.trainable, self.speed)
        jitter = self._jitter()
        if evaluation is None:
            return None
        self.folder.write_predictions(evaluation.label, evaluation.logit)
        result = {
            "evaluated_on": "holdout" if self.config.holdout_fraction else "test",
            **dataclasses.asdict(evaluation.metrics),
            "steps": self.progress.step,
            "train_rows": self._stream(0).num_rows,
            "seed": self.config.seed,
            "learning_rate": self.config.row_optimizer.learning_rate,
            "data_digest": self.manifest.digest(),
            "loss_jitter": jitter,
            **dataclasses.asdict(costs),
        }
        self.folder.finish(result)
        return result

    def evaluate(self) -> Evaluation | None:
        """Evaluate all rows now, and log it."""
        stream = BatchStream(
            self.evaluation_groups,
            max(self.config.batch_size, 4096),
            self.runtime.rank,
            self.runtime.world_size,
        )
        average = self.trainable.tower_average
        with self._bar("evaluate", stream.num_rows) as bar, average.in_place() if average else nullcontext():
            evaluation = evaluate(
                self.trainable.model, stream, self.config.prefetch_batches, self.runtime, bar.update
            )
        if evaluation is not None:
            self.folder.log("evaluation", self.progress.step, **dataclasses.asdict(evaluation.metrics))
        return evaluation

    def _advance(self, batch: Batch, loss: float, bar: tqdm[Any]) -> None:
        self.progress = Progress(
            step=self.progress.step + 1, epoch=self.progress.epoch, batch=self.progress.batch + 1
        )
        self.speed.add(batch.global_rows)
        bar.update(batch.global_rows)
        if self.on_rows is not None:
            self.on_rows(batch.global_rows)
        step = self.progress.step
        if step <= JITTER_STEPS:
            self.early_losses.append(loss)
        if step % self.config.log_every_steps == 0:
            (total,) = self._over_ranks([loss])
            bar.set_postfix(loss=f"{total:.4f}", refresh=False)
            self.folder.log("train", step, loss=total, rows_per_second=self.speed.rows_per_second)
        if self._due(self.config.evaluate_every_steps):
            with self.speed.paused():
                self.evaluate()

    def _due(self, interval: int | None) -> bool:
        step = self.progress.step
        return interval is not None and step % interval == 0 and 0 < step < self.num_steps

    def _save(self) -> None:
        with self.speed.paused():
            save_checkpoint(self.folder.checkpoints, self.trainable, self.progress, self._identity())

    def _identity(self) -> dict[str, Any]:
        """What decides the order of rows: a position means nothing in another order."""
        names = {"seed", "batch_size", "shuffle_window", "holdout_fraction", "max_train_rows"}
        return self.config.model_dump(mode="json", include=names) | {"data": self.manifest.digest()}

    def _over_ranks(self, shares: list[float]) -> list[float]:
        """Losses of global batches from every rank's shares of them."""
        totals = torch.tensor(shares, dtype=torch.float64)
        dist.all_reduce(totals)
        return [float(total) for total in totals]

    def _jitter(self) -> float | None:
        """Loss jitter of the run's first steps; None where this process did not see all of them."""
        seen_all = len(self.early_losses) == min(JITTER_STEPS, self.progress.step)
        return loss_jitter(self._over_ranks(self.early_losses)) if seen_all else None

    def _stream(self, epoch: int, start_batch: int = 0) -> BatchStream:
        config = self.config
        shuffle = Shuffle(config.seed, epoch, config.shuffle_window) if config.shuffle_window else None
        return BatchStream(
            self.train_groups,
            config.batch_size,
            self.runtime.rank,
            self.runtime.world_size,
            shuffle,
            start_batch,
        )

    def _bar(self, title: str, total: int, done: int = 0) -> tqdm[Any]:
        return tqdm(
            desc=title,
            total=total,
            initial=done,
            unit="row",
            unit_scale=True,
            disable=not self.runtime.is_main or self.on_rows is not None,
            mininterval=0.5,
        )

    def _kept(self) -> str:
        checkpoints = list_checkpoints(self.folder.checkpoints)
        return (
            f"The last good checkpoint is {checkpoints[-1]}" if checkpoints else "No checkpoint was saved yet"
        )

    def _say(self, text: str) -> None:
        if self.runtime.is_main and self.on_rows is None:
            tqdm.write(text)
