"""Time lookup and row update of our C++ kernels against FBGEMM's fused module and torch's EmbeddingBag.

    python scripts/bench_row_optimizers.py --threads 1 --output benchmarks/row_optimizers.csv
    python scripts/bench_row_optimizers.py --quick --output quick.csv     two pairs on the first shape

Ids are drawn from a zipf law (exponent 1.05) and striped as in training. Ours and the rival take each
batch in turn, so that a busy machine slows both alike; a ratio is the median over batches of ours / rival.
So do tables of 1e5 to 1e8 rows in all, to see how time grows with size; a batch has more distinct_rows then.
Phases:
forward; backward, which updates the rows too (for torch: with its optimizer's step); step, both together.
Times are wall-clock or, with --clock cpu, of all of this process's threads together, which other processes
disturb less. The kernels ask for huge pages and check that gradients are finite; the rivals do neither.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.tables import Table, TableShard, count_partitions

WARMUP_ROUNDS = 4
NUM_BATCHES = 4
Step = tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], Callable[[], None]]
"""Lookup of (indices, offsets), and what follows ``backward``."""


@dataclass(frozen=True)
class Shape:
    """Tables of one size, and batches of equal bags."""

    rows_per_table: int = 400_000
    width: int = 64
    batch_size: int = 4096
    ids_per_bag: int = 1
    num_tables: int = 26


FIRST = "26 x 400 k rows"
SHAPES = {
    FIRST: Shape(),
    "width 16": Shape(width=16),
    "width 128": Shape(width=128, rows_per_table=200_000),
    "batch 256": Shape(batch_size=256),
    "batch 16384": Shape(batch_size=16384),
    "multi-hot 10": Shape(ids_per_bag=10, batch_size=1024),
}
SIZES = {f"{rows:.0e} rows in all": Shape(rows // 26, width=16) for rows in (10**5, 10**6, 10**7, 10**8)}
RIVALS = {
    "fbgemm rowwise_adagrad": ("basis", "rowwise_adagrad"),
    "fbgemm adagrad": ("adam", "adagrad"),
    "fbgemm sgd": ("sgd",),
    "torch sparse_adam": ("adam",),
    "torch dense_adam": ("adam",),
}
"""Rival, and the rules of ours that run beside it; the first shape's memory fits 16 GB pair by pair."""
DENSE = Shape(rows_per_table=4_000)
"""What dense Adam is timed on: it walks every row at every step."""


def make_ours(rule: str, shape: Shape) -> Step:
    """Our bags with C++ kernels."""
    partitions = count_partitions(shape.rows_per_table, 64, 1024)
    tables = [Table(f"t{i}", shape.rows_per_table, shape.width, partitions) for i in range(shape.num_tables)]
    shards = [TableShard.whole(table) for table in tables]
    bags = RowOptimizedEmbeddingBags(shards, range(len(shards)), row_optimizer_defaults(rule), kernel="cpp")
    bags.weights.uniform_(-0.01, 0.01)
    return bags, lambda: None


def make_rival(name: str, shape: Shape) -> Step:
    """A key of ``RIVALS``; torch's tables are one EmbeddingBag, as large as all of them."""
    kind, rule = name.split()
    if kind == "fbgemm":
        optimizers = {
            "sgd": EmbOptimType.EXACT_SGD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
        }
        specs = [(padded_rows(shape), shape.width, EmbeddingLocation.HOST, ComputeDevice.CPU)]
        module = SplitTableBatchedEmbeddingBagsCodegen(
            specs * shape.num_tables,
            optimizer=optimizers[rule],
            learning_rate=0.01,
            eps=1e-8,
            pooling_mode=PoolingMode.SUM,
        )
        module.init_embedding_weights_uniform(-0.01, 0.01)
        return module, lambda: None
    bags = OneBag(padded_rows(shape), shape.width, shape.num_tables, sparse=rule == "sparse_adam")
    kinds = {"sparse_adam": torch.optim.SparseAdam, "dense_adam": torch.optim.Adam}
    optimizer = kinds[rule](list(bags.parameters()))

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return bags, finish


class OneBag(nn.Module):
    """Equal tables in one torch EmbeddingBag, which is faster than one for each."""

    def __init__(self, rows_per_table: int, width: int, num_tables: int, sparse: bool) -> None:
        super().__init__()
        rows = rows_per_table * num_tables
        self.bag = nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse, include_last_offset=True)
        self.starts = torch.arange(num_tables) * rows_per_table

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[B, F * D] from indices [L], equally many for each table, and offsets [F * B + 1]."""
        num_tables = len(self.starts)
        pooled = self.bag(indices + self.starts.repeat_interleave(len(indices) // num_tables), offsets)
        by_table = pooled.view(num_tables, -1, pooled.shape[1])
        return by_table.transpose(0, 1).reshape(by_table.shape[1], -1)


def padded_rows(shape: Shape) -> int:
    """Rows of a table whose partitions are full."""
    partitions = count_partitions(shape.rows_per_table, 64, 1024)
    return Table("", shape.rows_per_table, shape.width, partitions).num_rows


@functools.cache
def draw_batches(shape: Shape) -> list[torch.Tensor]:
    """Indices [L] int64 of each batch, feature-major."""
    table = Table("", shape.rows_per_table, shape.width, count_partitions(shape.rows_per_table, 64, 1024))
    generator = np.random.default_rng(0)
    count = shape.num_tables * shape.batch_size * shape.ids_per_bag
    return [table.rows_of(torch.from_numpy(draw_ids(generator, shape, count))) for _ in range(NUM_BATCHES)]


def count_distinct_rows(shape: Shape) -> int:
    """That a batch touches, the mean over batches."""
    batches = [batch.view(shape.num_tables, -1) for batch in draw_batches(shape)]
    return round(statistics.fmean(sum(len(ids.unique()) for ids in batch) for batch in batches))


def draw_ids(generator: np.random.Generator, shape: Shape, count: int) -> np.ndarray:
    """Ids [count] int64 of any table, the commonest being 0."""
    share = np.cumsum(np.arange(1, shape.rows_per_table + 1) ** -1.05)
    return np.searchsorted(share, generator.random(count) * share[-1])


Times = dict[str, list[float]]
"""Milliseconds of every timed batch by phase."""


def measure(
    shapes: dict[str, Shape], rival: str, rules: tuple[str, ...], rounds: int, clock: Callable[[], float]
) -> dict[str, dict[str, Times]]:
    """By shape and contender, all of them in turn."""
    contenders = [(label, name, shape) for label, shape in shapes.items() for name in (*rules, rival)]
    steps = [make_ours(n, shape) if n in rules else make_rival(n, shape) for _, n, shape in contenders]
    inputs = {label: draw_inputs(shape) for label, shape in shapes.items()}
    times: dict[str, dict[str, Times]] = {
        label: {name: {"forward": [], "backward": [], "step": []} for name in (*rules, rival)}
        for label in shapes
    }
    for number in range(rounds + WARMUP_ROUNDS):
        for (label, name, _), (lookup, finish) in zip(contenders, steps, strict=True):
            batches, offsets, gradient = inputs[label]
            begin = clock()
            pooled = lookup(batches[number % NUM_BATCHES], offsets)
            between = clock()
            pooled.backward(gradient)
            finish()
            end = clock()
            del pooled
            if number >= WARMUP_ROUNDS:
                of_phase = {"forward": between - begin, "backward": end - between, "step": end - begin}
                for phase, seconds in of_phase.items():
                    times[label][name][phase].append(seconds * 1e3)
    return times


def draw_inputs(shape: Shape) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Indices of each batch, offsets [F * B + 1], and the gradient [B, F * D] of the pooled vectors."""
    offsets = torch.arange(shape.num_tables * shape.batch_size + 1) * shape.ids_per_bag
    gradient = torch.randn(shape.batch_size, shape.num_tables * shape.width) / shape.batch_size
    return draw_batches(shape), offsets, gradient


def report(times: dict[str, Times], rival: str, shape: str, clock: str) -> list[dict[str, object]]:
    """A row for each rule of ours and phase."""
    rows: list[dict[str, object]] = []
    for rule in times:
        for phase, ours in times[rule].items():
            theirs = times[rival][phase]
            low, median, high = statistics.quantiles(ours, n=4)
            row: dict[str, object] = {
                "shape": shape,
                "threads": torch.get_num_threads(),
                "phase": phase,
                "rule": rule,
                "backend": "rival" if rule == rival else "cpp",
                "rival": rival,
                "median_ms": round(median, 2),
                "lower_quartile_ms": round(low, 2),
                "upper_quartile_ms": round(high, 2),
                "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
                "rounds": len(ours),
                "clock": clock,
                **machine_and_versions(),
            }
            rows.append(row)
            if rule != rival:
                print(
                    f"{shape:18s} {row['threads']} threads  {phase:8s} {rule:16s} {median:8.2f} ms   "
                    f"{rival} {statistics.median(theirs):8.2f} ms   ratio {row['ratio']}",
                    flush=True,
                )
    return rows


def machine_and_versions() -> dict[str, str]:
    """Columns that say where a row was measured."""
    return {
        "machine": f"{platform.machine()} {os.cpu_count()} cores, {cpu_name()}",
        "torch": torch.__version__,
        "fbgemm": version("fbgemm-gpu-cpu"),
    }


def write_rows(rows: list[dict[str, object]], path: Path) -> None:
    """A CSV file of ``rows``, which all have the columns of the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def cpu_name() -> str:
    """The processor's model."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def rivals_of(shape: str, quick: bool) -> dict[str, tuple[str, ...]]:
    """The part of ``RIVALS`` timed on ``shape``: one pair on all but the first, since 1e8 rows are large."""
    if shape != FIRST:
        return {"fbgemm rowwise_adagrad": ("basis",)}
    return {"fbgemm rowwise_adagrad": ("basis",), "fbgemm adagrad": ("adam",)} if quick else RIVALS


def parse_options(description: str | None, quick: str) -> tuple[argparse.Namespace, Callable[[], float]]:
    """The command line, and the clock that it names, in seconds; ``quick``: what --quick measures."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="CSV file to write")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    options = parser.parse_args()
    return options, time.perf_counter if options.clock == "wall" else time.process_time


def main() -> None:
    """Time all pairs, or those of the first shape that --quick names."""
    options, clock = parse_options(__doc__, "two pairs on the first shape, few rounds")
    torch.set_num_threads(options.threads)
    groups = [{name: shape} for name, shape in SHAPES.items() if name == FIRST or not options.quick]
    rows = []
    for shapes in groups if options.quick else [*groups, SIZES]:
        for rival, rules in rivals_of(next(iter(shapes)), options.quick).items():
            timed = {"26 x 4 k rows": DENSE} if rival == "torch dense_adam" else shapes
            measured = measure(timed, rival, rules, 10 if options.quick else options.rounds, clock)
            for label, times in measured.items():
                touched = count_distinct_rows(timed[label])
                rows += [
                    row | {"distinct_rows": touched} for row in report(times, rival, label, options.clock)
                ]
            gc.collect()
    if options.output:
        write_rows(rows, options.output)


if __name__ == "__main__":
    main()
