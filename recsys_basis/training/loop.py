"""One training run, from its config to result.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from recsys_basis.batches.batch import Batch
from recsys_basis.batches.parquet import RowGroup
from recsys_basis.batches.prefetch import prefetch
from recsys_basis.batches.stream import BatchStream, Shuffle
from recsys_basis.checkpoints.folder import list_checkpoints
from recsys_basis.checkpoints.load import START, load_checkpoint
from recsys_basis.checkpoints.save import CheckpointSaver
from recsys_basis.dense_optimizers import balanced_kernel
from recsys_basis.dense_optimizers.config import BalancedAdamConfig
from recsys_basis.diagnostics.recorder import Diagnostics
from recsys_basis.embeddings.choice import describe_choice
from recsys_basis.embeddings.sending import SentIds, send_ahead
from recsys_basis.errors import NonFiniteError
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.ingest.vocabulary import vocabulary_digest
from recsys_basis.metrics.jitter import JITTER_STEPS, loss_jitter
from recsys_basis.metrics.resources import RowMeter
from recsys_basis.row_optimizers.basis import BasisConfig
from recsys_basis.schema import ConfigError
from recsys_basis.training.build import Trainable, build
from recsys_basis.training.clipping import clip_gradients
from recsys_basis.training.costs import measure_costs
from recsys_basis.training.data import open_row_groups
from recsys_basis.training.evaluation import Evaluation, evaluate
from recsys_basis.training.quiet import silence_known_warnings
from recsys_basis.training.row_state import describe_row_state, summarize_row_state
from recsys_basis.training.run_folder import RunFolder, refuse_used_folder
from recsys_basis.training.runtime import Runtime, collectives_named, from_main, new_cpu_group, start_runtime
from recsys_basis.training.spec import TrainConfig
from recsys_basis.training.stopping import Agreement, Stopped, nobody_asks


def run_training(
    config: TrainConfig,
    on_rows: Callable[[int], object] | None = None,
    stop_asked: Callable[[], bool] = nobody_asks,
) -> dict[str, Any] | None:
    """Train, evaluate and save; returns what result.json holds (None on all but the main rank).

    ``on_rows`` is called with the rows of each step, in place of progress bars and words. Once
    ``stop_asked()`` is true on some rank, all save a checkpoint and return None. Raises StuckError, with
    rank and step, where another rank does not answer.
    """
    silence_known_warnings()
    with start_runtime(config.runtime) as runtime:
        refuse_used_folder(config, runtime)
        manifest = Manifest.load(Path(config.dataset.prepared_dir))
        train_groups, evaluation_groups = open_row_groups(config, manifest)
        trainable = build(config, manifest, runtime)
        folder = RunFolder(config, runtime)
        run = Run(
            config, runtime, trainable, folder, manifest, train_groups, evaluation_groups, stop_asked, on_rows
        )
        with closing(run), collectives_named(config.runtime, lambda: f"step {run.progress.step}"):
            run.resume()
            try:
                run.train()
                return run.finish()
            except Stopped:
                run.say(f"asked to stop: saved step {run.progress.step}; resume=auto goes on from there")
                return None


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
    stop_asked: Callable[[], bool]
    on_rows: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        self.progress = START
        self.early_losses: list[float] = []
        """This rank's shares of the losses of the first steps; short where the run was resumed."""
        self.num_steps = self._stream(0).num_batches * self.config.epochs
        if self.config.schedule.warmup_steps >= self.num_steps:
            raise ConfigError(
                f"schedule.warmup_steps = {self.config.schedule.warmup_steps} would not end within the "
                f"{self.num_steps} steps of this run"
            )
        for config in self.trainable.row_optimizer_of_table.values():
            if isinstance(config, BasisConfig) and max(config.grow_at, default=0) >= self.num_steps:
                raise ConfigError(
                    f"row_optimizer.grow_at = {list(config.grow_at)}: growth must come before the end of the "
                    f"{self.num_steps} steps of this run"
                )
        self.speed = RowMeter(WARMUP_STEPS)
        self.diagnostics = Diagnostics(self.trainable.embedding_bags(), self.config.diagnostics_every_steps)
        self.identity = self._identity()
        self.saver = CheckpointSaver(self.folder.checkpoints, self.trainable, self.identity)
        self.agreement = Agreement(new_cpu_group(self.config.runtime))
        self.evaluated: dict[str, float] | None = None
        """On the main rank: metrics of the weights as they are now, if they were evaluated."""
        self.stopping = False
        """All ranks have agreed to stop."""
        self.fault: str | None = None
        """What is wrong on this rank, until all ranks know."""

    def resume(self) -> None:
        """Continue from the newest checkpoint of this run's folder, else from the one that resume names."""
        own = list_checkpoints(self.folder.checkpoints)
        path = from_main(own[-1] if own else self.config.resume_path)
        if path is not None:
            new_data = path == self.config.resume_path
            loaded = load_checkpoint(path, self.trainable, self.identity, new_data)
            self.progress = loaded.progress
            if not new_data:
                self.saver.mark_saved(self.progress.step)
            for line in (*loaded.told, f"resumed from {path} at step {self.progress.step}"):
                self.say(line)
            if self.config.communication.towers == "powersgd":
                self.say(
                    "communication.towers = powersgd begins anew: whole gradients for its first "
                    f"{self.config.communication.powersgd_start_step} steps, then without the errors that "
                    "checkpoints do not hold; so the run differs from one that was never cut"
                )
        self.folder.start(self.progress.step)
        self._report_row_state()
        self._report_kernels()
        self.say(
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
                for batch, ids in self._with_ids(batches):
                    self._evaluate_if_due()
                    loss = self.step(batch, ids)
                    self._advance(batch, loss, bar)
            self.progress = self.progress.model_copy(update={"epoch": self.progress.epoch + 1, "batch": 0})

    def step(self, batch: Batch, ids: KeyedJaggedTensor | SentIds) -> float:
        """Forward, backward with the rows' update inside, the towers' update; this rank's loss share.

        ``ids``: the batch's, sent ahead or not. Raises Stopped, with a checkpoint saved, if a rank has been
        asked to stop; NonFiniteError on all ranks if the loss of one is not finite, or was a gradient of rows
        in the step before.
        """
        step = self.progress.step
        self.trainable.start_step(step, self.num_steps)
        logits = self.trainable.model(batch.dense, ids).squeeze(1)
        losses = F.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
        # Ranks may hold shares of different size; DDP and TorchRec both average over ranks, so this
        # makes every gradient the mean over the global batch.
        loss = losses * self.runtime.world_size / batch.global_rows
        if self.fault is None and not torch.isfinite(loss):
            self.fault = f"step {step}: the loss is {float(loss.detach())}"
        self._tell_ranks()
        # A checkpoint is due only now, when a forward pass has shown on all ranks that its weights are sound.
        if self.stopping or self._due(self.config.checkpoint_every_steps):
            self._hear_ranks()
            self._save(wait=self.stopping)
        if self.stopping:
            raise Stopped
        self.diagnostics.watch(step + 1, self.num_steps)
        loss.backward()
        self._hear_ranks()
        if (fault := self.trainable.take_fault()) is not None:
            self.fault = f"step {step}: {fault}"
        if self.config.max_gradient_norm is not None:
            self._clip(self.config.max_gradient_norm)
        self.trainable.finish_step()
        self.evaluated = None
        report = self.diagnostics.report()
        if report is not None:
            self.folder.log_diagnostics(step + 1, report)
        self.trainable.grow(step + 1)
        return float(loss.detach()) / self.runtime.world_size

    def finish(self) -> dict[str, Any] | None:
        """Evaluation of every row, last checkpoint, result.json. Raises as ``step`` does."""
        self._tell_ranks()
        self._hear_ranks()
        try:
            evaluation = self.evaluate()
        except Stopped:
            self._save(wait=True)
            raise
        self._save(wait=True)
        costs = measure_costs(self.trainable, self.speed)
        self.folder.write_row_state(describe_row_state(self.trainable))  # it may have grown
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
        """Evaluate all rows now, and log it. Raises Stopped if a rank has been asked to stop meanwhile."""
        stream = BatchStream(
            self.evaluation_groups,
            max(self.config.batch_size, 4096),
            self.runtime.rank,
            self.runtime.world_size,
        )
        average = self.trainable.tower_average
        with self._bar("evaluate", stream.num_rows) as bar, average.in_place() if average else nullcontext():

            def on_batch(rows: int) -> None:
                bar.update(rows)
                self._tell_ranks()
                if self.stopping:
                    raise Stopped

            evaluation = evaluate(
                self.trainable.model, stream, self.config.prefetch_batches, self.runtime, on_batch
            )
        self.progress = self.progress.model_copy(update={"evaluated_step": self.progress.step})
        if evaluation is not None:
            self.evaluated = dataclasses.asdict(evaluation.metrics)
            self.folder.log("evaluation", self.progress.step, **self.evaluated)
        return evaluation

    def _with_ids(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, KeyedJaggedTensor | SentIds]]:
        """Each batch on the device, and its ids: sent ahead, or for the model to send."""
        moved = (batch.to(self.runtime.device) for batch in batches)
        if self.config.communication.ids_ahead:
            return send_ahead(moved, self.trainable.embeddings())
        return ((batch, batch.sparse) for batch in moved)

    def _advance(self, batch: Batch, loss: float, bar: tqdm[Any]) -> None:
        self.progress = self.progress.model_copy(
            update={"step": self.progress.step + 1, "batch": self.progress.batch + 1}
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

    def _evaluate_if_due(self) -> None:
        """Keeps the weights if they are the best so far."""
        if (
            not self._due(self.config.evaluate_every_steps)
            or self.progress.evaluated_step == self.progress.step
        ):
            return
        with self.speed.paused():
            try:
                self.evaluate()
            except Stopped:
                return  # the step that follows saves and stops; a resumed run evaluates
            if self.saver.is_best(self.evaluated):
                self._save()

    def _due(self, interval: int | None) -> bool:
        step = self.progress.step
        return interval is not None and step % interval == 0 and 0 < step < self.num_steps

    def _tell_ranks(self) -> None:
        """Tell the other ranks, once what they said before is heard."""
        self._hear_ranks()
        # A save that failed in the background stops the run as well: the next one raises the reason.
        self.agreement.say(self.stop_asked() or self.saver.has_failed(), self.fault is not None)

    def _hear_ranks(self) -> None:
        """Take note of a stop. Raises NonFiniteError on all ranks if one has said that something is wrong."""
        stop, fault = self.agreement.hear()
        if fault:
            raise self._diverged(self.agreement.hear_all(self.fault))
        self.stopping |= stop

    def _clip(self, max_norm: float) -> None:
        try:
            clip_gradients(self.trainable.dense_parameters(), self.trainable.embedding_bags(), max_norm)
        except NonFiniteError as error:
            raise self._diverged(f"step {self.progress.step}: {error}") from error

    def _diverged(self, words: str) -> NonFiniteError:
        saved = list_checkpoints(self.folder.checkpoints)
        kept = f"The last good checkpoint is {saved[-1]}" if saved else "No checkpoint was saved yet"
        return NonFiniteError(f"{words}; lower the learning rates. {kept}")

    def _save(self, wait: bool = False) -> None:
        with self.speed.paused():
            self.saver.save(self.progress, self.evaluated, wait)

    def close(self) -> None:
        """Leave nothing under way."""
        self.saver.close()
        self.agreement.hear()

    def _identity(self) -> dict[str, Any]:
        """What decides the order of rows, since a position means nothing in another, and what ids mean."""
        names = {"seed", "batch_size", "shuffle_window", "holdout_fraction", "max_train_rows"}
        folder = self.config.dataset.prepared_dir
        return self.config.model_dump(mode="json", include=names) | {
            "data": self.manifest.digest(),
            "vocabulary": {
                column: vocabulary_digest(self.manifest, folder, column)
                for column in self.manifest.vocabulary_files
            },
        }

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

    def _report_row_state(self) -> None:
        described = describe_row_state(self.trainable)
        self.folder.write_row_state(described)
        for words in summarize_row_state(self.trainable, described):
            self.say(words)

    def _report_kernels(self) -> None:
        """What ``auto`` takes."""
        if self.config.embedding.kernel == "auto":
            device_type, configs = self.runtime.device.type, self.trainable.row_optimizer_of_table.values()
            for words in dict.fromkeys(describe_choice(config, device_type) for config in configs):
                self.say(words)
        dense = self.config.dense_optimizer
        if isinstance(dense, BalancedAdamConfig) and dense.kernel == "auto":
            self.say(balanced_kernel.describe_choice(self.trainable.dense_parameters()))

    def say(self, text: str) -> None:
        if self.runtime.is_main and self.on_rows is None:
            tqdm.write(text)
