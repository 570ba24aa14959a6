"""Peak memory of training, beside weights and optimizer state by the formula that `plan` uses.

    python scripts/measure_memory.py --output benchmarks/memory.csv
    python scripts/measure_memory.py --quick --output quick.csv      1 M rows alone

One process for each case trains a DLRM with small towers (26 tables, D = 64, batch 4096, one thread) by the
step of `recsys-basis train`, until each row has been updated once, so that no page of weights or state is
left untouched. growth_bytes is its peak resident memory less what was resident before the tables were made;
workspace_bytes is what weights and state do not explain: activations, gradients of one batch, towers,
libraries. It must not grow with the rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from bench_row_optimizers import Shape, machine_and_versions, write_rows
from bench_train import make_config, make_ours

from recsys_basis.batches.batch import Batch
from recsys_basis.ingest.columns import DENSE_COLUMNS
from recsys_basis.metrics.resources import peak_memory_bytes
from recsys_basis.planning.placement import bytes_alone
from recsys_basis.training.quiet import silence_known_warnings
from recsys_basis.training.runtime import start_runtime

RULES = ("basis", "adam")
TOWERS = ("model.dense_arch=[64]", "model.over_arch=[64,1]")
ROWS_PER_TABLE = (40_960, 409_600)
"""Whole batches."""


def measure(rule: str, rows_per_table: int) -> dict[str, Any]:
    """Train on every id once, in a process of its own."""
    silence_known_warnings()
    shape = Shape(rows_per_table)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(shape, rule, 1, folder, *TOWERS)
        with start_runtime(config.runtime) as runtime:
            before = resident_bytes()
            contender, trainable = make_ours(config, shape, runtime, time.perf_counter)
            for start in range(0, rows_per_table, shape.batch_size):
                contender.step(batch_of(shape, start))
            growth = peak_memory_bytes() - before
    rules = trainable.row_optimizer_of_table
    formula = [bytes_alone(trainable.config.embedding, rules, table) for table in trainable.tables]
    weights, state = (sum(each) for each in zip(*formula, strict=True))
    return {
        "rule": rule,
        "rows": sum(table.num_rows for table in trainable.tables),
        "width": shape.width,
        "batch_size": shape.batch_size,
        "growth_bytes": growth,
        "weights_bytes": weights,
        "state_bytes": state,
        "workspace_bytes": growth - weights - state,
        **machine_and_versions(),
    }


def batch_of(shape: Shape, start: int) -> Batch:
    """Ids ``start`` .. ``start + batch_size - 1`` of every table."""
    generator = np.random.default_rng(start)
    ids = np.arange(start, start + shape.batch_size, dtype=np.int32)
    dense = generator.standard_normal((shape.batch_size, len(DENSE_COLUMNS)), dtype=np.float32)
    label = generator.integers(0, 2, shape.batch_size).astype(np.float32)
    return Batch.from_columns(dense, np.tile(ids, (shape.num_tables, 1)), label, shape.batch_size)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """All rules at both sizes, or at the small one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="CSV file to write")
    parser.add_argument("--quick", action="store_true", help="1 M rows alone")
    options = parser.parse_args()
    cases = [(rule, rows) for rows in ROWS_PER_TABLE[: 1 if options.quick else None] for rule in RULES]
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for row in processes.map(measure, *zip(*cases, strict=True)):
            rows.append(row)
            words = [
                f"{name} {row[f'{name}_bytes'] / 1e6:8.1f} MB"
                for name in ("growth", "weights", "state", "workspace")
            ]
            print(f"{row['rule']:16s} {row['rows']:>10,} rows   {'   '.join(words)}", flush=True)
    if options.output:
        write_rows(rows, options.output)


if __name__ == "__main__":
    main()
