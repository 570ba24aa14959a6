"""Runs killed with kill -9 at random moments, in saves too: do they end with the undisturbed weights?

    python scripts/fault_drill.py --kills 30 --ranks 1,2

For each number of ranks one run is left alone; then others like it are killed (all ranks, or one of them) and
started again with resume=auto, until the kills are spent and the last run has ended. A kill comes up to a
fifth of the run after the start, sometimes before the first step; every second one waits for a save.
Prints each kill and, for each run that ended, whether every tensor of its last checkpoint has the undisturbed
run's bits; exits with 1 if one has not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recsys_basis.checkpoints.folder import list_checkpoints
from recsys_basis.checkpoints.index import read_tensors
from recsys_basis.config import compose_job
from recsys_basis.errors import UserError
from recsys_basis.ingest.spec import DatasetConfig, SyntheticConfig
from recsys_basis.ingest.synthetic import synthesize
from recsys_basis.prepare import prepare
from recsys_basis.schema import parse_section
from recsys_basis.training.loop import run_training
from recsys_basis.training.spec import TrainConfig

SETTINGS = (
    "dataset.row_group_rows=500",
    "batch_size=64",
    "embedding.embedding_dim=8",
    "embedding.min_rows_per_partition=16",
    "model.dense_arch=[16,8]",
    "model.over_arch=[16,1]",
    "shuffle_window=3",
    "tower_average_decay=0.9",
    "schedule=linear",
    "checkpoint_every_steps=5",
    "evaluate_every_steps=40",
    "checkpoint_best_by=auc",
    "resume=auto",
    "runtime.device=cpu",
    "runtime.threads_per_rank=1",
    "runtime.collective_timeout_s=60",
)


@dataclass(frozen=True)
class Kill:
    """One kill: ``step`` that the main rank had done; ``in_save``: a checkpoint was half written."""

    ranks: int
    run: int
    killed: str
    step: int
    in_save: bool


@dataclass(frozen=True)
class Verdict:
    """A run that ended after ``kills`` kills; the tensors that are not the undisturbed run's."""

    ranks: int
    run: int
    kills: int
    differing: tuple[str, ...]


def drill(
    prepared: Path, folder: Path, ranks: int, kills: int, seed: int, settings: Sequence[str] = ()
) -> tuple[list[Kill], list[Verdict]]:
    """Kill runs of ``ranks`` ranks ``kills`` times; ``settings`` are overrides of the training config."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recsys_basis.training.loop"])
    chance = random.Random(f"{seed} {ranks}")
    job = Job(context, prepared, folder / "alone", ranks, settings)
    job.start()
    job.wait()
    expected, num_steps = last_tensors(job.output_dir), job.step
    done: list[Kill] = []
    verdicts: list[Verdict] = []
    while len(done) < kills:
        run = len(verdicts)
        job, before = Job(context, prepared, folder / f"killed-{run}", ranks, settings), len(done)
        while len(done) < kills:
            job.start()
            in_save = len(done) % 2 == 1
            if not job.lives_until(job.step + chance.randint(0, num_steps // 5), in_save):
                break
            time.sleep(chance.uniform(0.0, 0.03))
            victims = chance.choice([list(range(ranks)), [chance.randrange(ranks)]])
            step, in_save = job.kill(victims)
            killed = "all" if len(victims) == ranks else f"rank {victims[0]}"
            done.append(Kill(ranks, run, killed, step, in_save))
        else:
            job.start()
        job.wait()
        differing = differing_tensors(last_tensors(job.output_dir), expected)
        verdicts.append(Verdict(ranks, run, len(done) - before, differing))
    return done, verdicts


class Job:
    """One run of several ranks, each a process; started again, it resumes."""

    def __init__(
        self, context: Any, prepared: Path, output_dir: Path, ranks: int, settings: Sequence[str]
    ) -> None:
        self.output_dir, self.ranks = output_dir, ranks
        overrides = [f"dataset.prepared_dir={prepared}", f"output_dir={output_dir}", *SETTINGS, *settings]
        self._config = parse_section(TrainConfig, compose_job("train", overrides))
        self._context = context
        self._step = context.Value("q", 0)

    def start(self) -> None:
        port = free_port()
        self._processes = [
            self._context.Process(target=_train, args=(self._config, rank, self.ranks, port, self._step))
            for rank in range(self.ranks)
        ]
        for process in self._processes:
            process.start()

    def wait(self) -> None:
        """Until the run has ended. Raises RuntimeError if it failed."""
        for process in self._processes:
            process.join()
        if not (self.output_dir / "result.json").is_file():
            raise RuntimeError(f"{self.output_dir}: the run failed; its output says why")

    @property
    def step(self) -> int:
        """Steps that the main rank had done when it last said so."""
        return int(self._step.value)

    def lives_until(self, step: int, in_save: bool) -> bool:
        """Wait for ``step``, and with ``in_save`` for the next save; False if the run has ended before."""
        while self.step < step or (in_save and not self._is_saving()):
            if wait([self._processes[0].sentinel], timeout=0.0005):
                return False
        return True

    def kill(self, victims: Sequence[int]) -> tuple[int, bool]:
        """kill -9 ``victims``; the ranks left fail by themselves. The step, and whether a save was cut."""
        for rank in victims:
            self._processes[rank].kill()
        for rank in victims:
            self._processes[rank].join()
        step, in_save = self.step, self._is_saving()
        for process in self._processes:
            process.join()
        return step, in_save

    def _is_saving(self) -> bool:
        return any((self.output_dir / "checkpoints").glob("*.partial"))


def _train(config: TrainConfig, rank: int, ranks: int, port: int, step: Any) -> None:
    """Body of a rank's process."""
    become_rank(rank, ranks, port)
    checkpoints = list_checkpoints(Path(config.output_dir) / "checkpoints")
    begun = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0

    def count(rows: int) -> None:
        nonlocal begun
        begun += 1
        if rank == 0:
            step.value = begun

    try:
        run_training(config, count)
    except (UserError, RuntimeError):  # another rank was killed
        raise SystemExit(1) from None


def last_tensors(output_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint."""
    return read_tensors(list_checkpoints(output_dir / "checkpoints")[-1])


def differing_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """Names that only one of them has, or with other bits."""
    same = {key for key in found.keys() & expected.keys() if torch.equal(found[key], expected[key])}
    return tuple(sorted((found.keys() | expected.keys()) - same))


def make_data(folder: Path) -> Path:
    """A few thousand synthetic clicks, prepared."""
    small = ["synthetic.rows=4000", "synthetic.cardinality_scale=0.001", f"output_dir={folder}"]
    synthesize(parse_section(SyntheticConfig, compose_job("synthesize", small)["synthetic"]))
    prepared = folder / "prepared"
    settings = [
        f"dataset.raw_paths=[{folder}/clicks.tsv.gz]",
        f"output_dir={prepared}",
        f"dataset.prepared_dir={prepared}",
        "dataset.row_group_rows=500",
    ]
    prepare(parse_section(DatasetConfig, compose_job("prepare", settings)["dataset"]))
    return prepared


def become_rank(rank: int, ranks: int, port: int) -> None:
    """Make this process one of ``ranks`` on this machine, by torchrun's environment."""
    # tqdm's own is shared by processes: a kill would leave its semaphore behind.
    tqdm.set_lock(threading.RLock())
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> int:
    """The exit code: 1 if a run has ended with other tensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="shared among the numbers of ranks")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, separated by commas")
    parser.add_argument("--epochs", type=int, default=4, help="50 steps each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    worlds = [int(ranks) for ranks in options.ranks.split(",")]
    all_kills: list[Kill] = []
    all_verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as place:
        prepared = make_data(Path(place))
        for number, ranks in enumerate(worlds):
            share = (options.kills + number) // len(worlds)
            folder, settings = Path(place) / f"ranks-{ranks}", [f"epochs={options.epochs}"]
            kills, verdicts = drill(prepared, folder, ranks, share, options.seed, settings)
            all_kills += kills
            all_verdicts += verdicts
    console = Console()
    table = Table("kill", "ranks", "run", "killed", "step", "in a save")
    for number, kill in enumerate(all_kills, 1):
        values = (number, kill.ranks, kill.run, kill.killed, kill.step)
        table.add_row(*map(str, values), "yes" if kill.in_save else "")
    console.print(table)
    table = Table("ranks", "run", "kills", "tensors that differ from the undisturbed run's")
    for verdict in all_verdicts:
        differing = ", ".join(verdict.differing) or "none"
        table.add_row(str(verdict.ranks), str(verdict.run), str(verdict.kills), differing)
    console.print(table)
    in_saves = sum(kill.in_save for kill in all_kills)
    print(f"{len(all_kills)} kills, {in_saves} of them in a save; {len(all_verdicts)} runs ended")
    return int(any(verdict.differing for verdict in all_verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
