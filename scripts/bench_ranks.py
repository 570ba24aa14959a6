"""Rows a second of `recsys-basis train` on two ranks beside one, a core and a thread for each rank.

    python scripts/bench_ranks.py --output benchmarks/ranks.csv
    python scripts/bench_ranks.py --batches 256 --rounds 3 --output quick.csv

Each contender is the whole job, reader and agreement to stop included: `run_training` of the default DLRM
with `basis`, on synthetic clicks in Criteo's form. Beside one rank of batch B train two ranks of batch B each
(weak: a step has twice the rows) and two ranks that share batch B (strong: the same global batches),
table-wise and row-wise. Ranks are added for the first, with a batch as large as the model bears; the second
shows what they bring where the batch is given. And two runs of one rank each, which exchange nothing (apart):
what the cores lose by sharing memory, caches and clock, and no exchange could win back.

Efficiency: rows a second over twice one rank's. Processor efficiency: rows a second of processor time over
one rank's; ranks' waiting for each other and other processes are not in it.

All contenders are started once. Then each has a slice of a few seconds in turn while the others are stopped
(SIGSTOP), so that a busy machine slows all alike; efficiencies are medians over rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_row_optimizers import machine_and_versions, write_rows
from fault_drill import become_rank, free_port

from recsys_basis.config import compose_job
from recsys_basis.ingest.spec import DatasetConfig, SyntheticConfig
from recsys_basis.ingest.synthetic import synthesize
from recsys_basis.prepare import prepare
from recsys_basis.schema import parse_section
from recsys_basis.training.loop import run_training
from recsys_basis.training.spec import TrainConfig

SHARDINGS = ("table_wise", "row_wise")
APART = "apart"
"""Its rows a second are twice those of the run on the first core."""
SETTLE_S = 0.3
"""What a slice begins with, while caches and the ranks find each other again: not counted."""
FIRST_STEPS, FEWEST_STEPS = 20, 2
MOST_STEPS = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")
Rates = list[tuple[float, float]]
"""Of each round: rows a second, and a second of processor time."""


@dataclass(frozen=True)
class Contender:
    """A run under way; ``ends`` holds its number of steps, then when each ended on the main rank, in s."""

    scaling: str
    sharding: str
    ranks: int
    batch_size: int
    ends: Any
    processes: list[Any] = field(default_factory=list)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def measure(self, seconds: float) -> tuple[float, float]:
        """Rows a second, by the wall's clock and of processor time, in the next ``seconds`` or, if they take
        longer, ``FEWEST_STEPS``; from the end of a step to the end of a step."""
        self.resume()
        time.sleep(SETTLE_S)
        first, begin, used = self.steps, time.perf_counter(), self._processor_seconds()
        time.sleep(seconds)
        self.wait_for(first + FEWEST_STEPS)
        last, end, used = self.steps, time.perf_counter(), self._processor_seconds() - used
        self.stop()
        rate = (last - first) * self.batch_size / (self.ends[last] - self.ends[first])
        return rate, rate * (end - begin) / used

    def wait_for(self, step: int) -> None:
        """Raises RuntimeError if a rank ends before."""
        while self.steps < step:
            if not all(process.is_alive() for process in self.processes):
                raise RuntimeError(f"{self.scaling}, {self.sharding}: it has ended; its output says why")
            time.sleep(0.01)

    @property
    def steps(self) -> int:
        return int(self.ends[0])

    def _processor_seconds(self) -> float:
        """Of all threads of all ranks so far."""
        stats = [Path(f"/proc/{process.pid}/stat").read_text() for process in self.processes]
        fields = [stat.rpartition(")")[2].split() for stat in stats]  # after the name: state is 3 of proc(5)
        return sum(int(user) + int(system) for *_, user, system in (each[:13] for each in fields)) / TICKS

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.kill(process.pid, number)


def start_all(
    contenders: list[Contender], size: int, data: Path, place: Path, settings: Sequence[str]
) -> None:
    """Add all contenders, stopped, for B = ``size``; the first is the one rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recsys_basis.training.loop"])
    runs = [("one rank", 1, size, SHARDINGS[0])]
    runs += [("weak", 2, 2 * size, sharding) for sharding in SHARDINGS]
    runs += [("strong", 2, size, sharding) for sharding in SHARDINGS]
    runs += [(APART, 2, 2 * size, SHARDINGS[0])]
    for scaling, ranks, batch, sharding in runs:
        contenders.append(Contender(scaling, sharding, ranks, batch, context.RawArray("d", MOST_STEPS)))
        start(context, data, place / f"{size}-{scaling}-{sharding}", contenders[-1], settings)


def start(context: Any, data: Path, folder: Path, contender: Contender, settings: Sequence[str]) -> None:
    """Train ``contender`` past its first steps, then stop it."""
    ranks = 1 if contender.scaling == APART else contender.ranks
    for core in range(contender.ranks):
        run, rank = divmod(core, ranks)
        if rank == 0:
            port = free_port()
        overrides = [
            f"dataset.prepared_dir={data}",
            "dataset.min_count=1",
            f"output_dir={folder / str(run)}",
            f"batch_size={contender.batch_size * ranks // contender.ranks}",
            f"embedding.sharding={contender.sharding}",
            "epochs=1000000",
            "runtime.device=cpu",
            "runtime.threads_per_rank=1",
            *settings,
        ]
        config = parse_section(TrainConfig, compose_job("train", overrides))
        arguments = (config, rank, ranks, port, core, contender.ends)
        contender.processes.append(context.Process(target=train, args=arguments, daemon=True))
        contender.processes[-1].start()
    contender.wait_for(FIRST_STEPS)
    contender.stop()


def train(config: TrainConfig, rank: int, ranks: int, port: int, core: int, ends: Any) -> None:
    """Body of a rank's process, on a core of its own."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
    become_rank(rank, ranks, port)

    def note(rows: int) -> None:
        if core == 0:
            step = int(ends[0]) + 1
            ends[step], ends[0] = time.perf_counter(), step

    run_training(config, note)


def make_data(folder: Path, rows: int) -> Path:
    """Prepared synthetic clicks; every value has a row of its own."""
    raw = [
        f"synthetic.rows={rows}",
        "synthetic.cardinality_scale=0.15",
        f"synthetic.path={folder}/clicks.tsv",
    ]
    synthesize(parse_section(SyntheticConfig, compose_job("synthesize", raw)["synthetic"]))
    settings = [
        f"dataset.raw_paths=[{folder}/clicks.tsv]",
        f"output_dir={folder}/prepared",
        f"dataset.prepared_dir={folder}/prepared",
        "dataset.min_count=1",
    ]
    prepare(parse_section(DatasetConfig, compose_job("prepare", settings)["dataset"]))
    return folder / "prepared"


def report(contenders: list[Contender], rates: list[Rates], per_rank: int) -> list[dict[str, object]]:
    """A row for each contender and its ``rates``. The first is the one rank."""
    rows = []
    for contender, own in zip(contenders, rates, strict=True):
        low, median, high = statistics.quantiles([wall for wall, _ in own], n=4)
        rounds = list(zip(own, rates[0], strict=True))
        efficiency = statistics.median(two[0] / one[0] / contender.ranks for two, one in rounds)
        of_processor = statistics.median(two[1] / one[1] for two, one in rounds)
        rows.append(
            {
                "one_rank_batch": per_rank,
                "scaling": contender.scaling,
                "sharding": contender.sharding,
                "ranks": contender.ranks,
                "threads_per_rank": 1,
                "global_batch": contender.batch_size,
                "rows_per_s": round(median),
                "lower_quartile": round(low),
                "upper_quartile": round(high),
                "efficiency": round(efficiency, 3),
                "processor_efficiency": round(of_processor, 3),
                "rounds": len(own),
                **machine_and_versions(),
            }
        )
        print(
            f"batch {per_rank:5d}  {contender.scaling:8s} {contender.sharding:10s} {contender.ranks} ranks  "
            f"{rows[-1]['rows_per_s']:7,} rows/s   efficiency {efficiency:.3f}, "
            f"of processor time {of_processor:.3f}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure every batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="CSV file to write")
    parser.add_argument("--batches", default="256,1024,4096", help="B of one rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slice", type=float, default=2.0, help="seconds of a contender in a round")
    parser.add_argument("--rows", type=int, default=600_000, help="of the synthetic log")
    parser.add_argument("settings", nargs="*", help="overrides of the training config, for all contenders")
    options = parser.parse_args()
    # What ends this process must end those that it has stopped, which nothing else would.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as place:
        data = make_data(Path(place), options.rows)
        for size in map(int, options.batches.split(",")):
            contenders: list[Contender] = []
            try:
                start_all(contenders, size, data, Path(place), options.settings)
                rates = [[each.measure(options.slice) for each in contenders] for _ in range(options.rounds)]
            finally:
                for contender in contenders:
                    contender.kill()
            rows += report(contenders, list(map(list, zip(*rates, strict=True))), size)
            if options.output:
                write_rows(rows, options.output)


if __name__ == "__main__":
    main()
