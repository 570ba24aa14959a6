"""Rows a second of whole training steps of a DLRM: ours beside two plain scripts of the same model.

    python scripts/bench_train.py --threads 1 --output benchmarks/train.csv
    python scripts/bench_train.py --quick --output quick.csv      D = 16 alone, few rounds

Contenders:
basis, rowwise_adagrad: the step that `recsys-basis train` takes, with this row optimizer and C++ kernels;
torchrec fbgemm: TorchRec's DistributedModelParallel, tables in FBGEMM's fused rowwise Adagrad;
torch sparse_adam: one EmbeddingBag(sparse=True) of all tables, SparseAdam.
All have the same towers, AdamW for them, and the same initial weights: their first logits must agree.
A row has 26 ids drawn from a zipf law (exponent 1.05), 13 normal numbers and a random label; batches lie in
memory. Ours and the rival take each batch in turn; speedup is the median over batches of rival / ours.

Phases: forward; backward (loss, gradients and the rows' update, torch's SparseAdam too); dense (the towers'
optimizer); step: all of it, from clearing gradients on. And for ours alone, for as many rows: reader (Parquet
to batch, which in training a thread does meanwhile) and metrics (AUC and the rest, of evaluated rows only).
Ours alone checks ids, loss and gradients at each step. Times are wall-clock or, with --clock cpu, of all of
this process's threads together, which other processes disturb less.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_row_optimizers import (
    NUM_BATCHES,
    WARMUP_ROUNDS,
    OneBag,
    Shape,
    draw_ids,
    machine_and_versions,
    parse_options,
    write_rows,
)
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recsys_basis.batches.batch import Batch
from recsys_basis.batches.parquet import RowGroup, list_row_groups
from recsys_basis.batches.stream import BatchStream, Shuffle
from recsys_basis.config import compose_job
from recsys_basis.dense_optimizers import create_dense_optimizer
from recsys_basis.ingest.columns import DENSE_COLUMNS, LABEL_COLUMN, PREPARED_SCHEMA, SPARSE_COLUMNS
from recsys_basis.metrics.click import click_metrics
from recsys_basis.models import create_model
from recsys_basis.schema import parse_section
from recsys_basis.tables import Table
from recsys_basis.training.build import Trainable, build, dense_parameters
from recsys_basis.training.loop import Run
from recsys_basis.training.quiet import silence_known_warnings
from recsys_basis.training.run_folder import RunFolder
from recsys_basis.training.runtime import Runtime, start_runtime
from recsys_basis.training.spec import TrainConfig

SHAPES = {"26 x 400 k rows, width 16": Shape(width=16), "26 x 400 k rows": Shape()}
RIVALS = {"torchrec fbgemm": ("basis", "rowwise_adagrad"), "torch sparse_adam": ("basis",)}
"""Rival, and the rules of ours that run beside it; 12 GB at once."""
Times = dict[str, list[float]]
"""Milliseconds of every timed batch by phase."""


class Contender:
    """A training step, and a clock on the parts of it that all contenders have."""

    def __init__(
        self,
        step: Callable[[Batch], None],
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer,
        clock: Callable[[], float],
    ) -> None:
        self.step, self.model, self.clock = step, model, clock
        self.marks: list[float] = []
        model.register_forward_pre_hook(self._mark)
        model.register_forward_hook(self._mark)
        dense_optimizer.register_step_pre_hook(self._mark)
        dense_optimizer.register_step_post_hook(self._mark)

    def time(self, batch: Batch) -> dict[str, float]:
        """Milliseconds of one step, by phase."""
        self.marks = []
        begin = self.clock()
        self.step(batch)
        end = self.clock()
        forward, backward, dense, after = self.marks
        seconds = {
            "forward": backward - forward,
            "backward": dense - backward,
            "dense": after - dense,
            "step": end - begin,
        }
        return {phase: value * 1e3 for phase, value in seconds.items()}

    def _mark(self, *_: object) -> None:
        self.marks.append(self.clock())


def make_config(shape: Shape, rule: str, threads: int, output_dir: str, *overrides: str) -> TrainConfig:
    """The defaults of `recsys-basis train` at this shape, but for ``overrides``."""
    settings = [
        f"row_optimizer={rule}",
        f"batch_size={shape.batch_size}",
        f"embedding.embedding_dim={shape.width}",
        "embedding.kernel=cpp",
        "runtime.device=cpu",
        f"runtime.threads_per_rank={threads}",
        f"output_dir={output_dir}",
    ]
    return parse_section(TrainConfig, compose_job("train", [*settings, *overrides]))


def make_ours(
    config: TrainConfig, shape: Shape, runtime: Runtime, clock: Callable[[], float]
) -> tuple[Contender, Trainable]:
    """The job's own step; it never opens the rows that its run is said to have."""
    cardinalities = dict.fromkeys(SPARSE_COLUMNS, shape.rows_per_table)
    manifest: Any = SimpleNamespace(cardinalities=cardinalities, vocabulary_files={}, digest=lambda: "none")
    trainable = build(config, manifest, runtime)
    rows = [RowGroup(Path("none"), 0, 0, 10**6 * config.batch_size)]
    run = Run(
        config, runtime, trainable, RunFolder(config, runtime), manifest, rows, [], stop_asked=lambda: False
    )

    def step(batch: Batch) -> None:
        run.step(batch, batch.sparse)
        run.progress = run.progress.model_copy(update={"step": run.progress.step + 1})

    return Contender(step, trainable.model, trainable.dense_optimizer, clock), trainable


def make_rival(name: str, config: TrainConfig, ours: Trainable, clock: Callable[[], float]) -> Contender:
    """A key of ``RIVALS``, with the weights that ``ours`` has now."""
    make = {"torchrec fbgemm": make_fbgemm, "torch sparse_adam": make_sparse_adam}[name]
    model, row_optimizer, weights = make(config, ours)
    for table, rows, weight in zip(ours.tables, whole_tables(ours.model, ours.tables), weights, strict=True):
        weight.copy_(rows[table.rows_of(torch.arange(table.num_ids))])
    towers = [(name, weight) for name, weight in dense_parameters(model) if "embedding_bag" not in name]
    dense_optimizer = create_dense_optimizer(config.dense_optimizer, model, towers)

    def step(batch: Batch) -> None:
        dense_optimizer.zero_grad()
        row_optimizer.zero_grad()
        logits = model(batch.dense, batch.sparse).squeeze(1)
        F.binary_cross_entropy_with_logits(logits, batch.label).backward()
        row_optimizer.step()
        dense_optimizer.step()

    return Contender(step, model, dense_optimizer, clock)


def make_fbgemm(config: TrainConfig, ours: Trainable) -> tuple[nn.Module, Any, list[torch.Tensor]]:
    """Model, optimizer of its rows (backward does its work), and the weights of each table."""
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01, "eps": 1e-8}
    )
    collection = EmbeddingBagCollection(tables=plain_tables(ours), device=torch.device("meta"))
    model = create_model(config.model, collection, len(DENSE_COLUMNS), config.seed)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, local_world_size=1, compute_device="cpu", ddr_cap=1 << 40),
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=planner.plan(model, [sharder]),
        sharders=[sharder],
    )
    return sharded, sharded.fused_optimizer, whole_tables(sharded, ours.tables)


def make_sparse_adam(config: TrainConfig, ours: Trainable) -> tuple[nn.Module, Any, list[torch.Tensor]]:
    """As ``make_fbgemm``, in plain torch."""
    collection = TorchCollection(plain_tables(ours))
    model = create_model(config.model, collection, len(DENSE_COLUMNS), config.seed)
    weight = collection.embedding_bag.bag.weight
    return model, torch.optim.SparseAdam([weight]), list(weight.detach().chunk(len(ours.tables)))


def whole_tables(model: nn.Module, tables: Sequence[Table]) -> list[torch.Tensor]:
    """Live weights of each of ``tables`` in a model that is sharded over one rank."""
    state = model.state_dict()
    found = [
        value for table in tables for key, value in state.items() if key.endswith(f".{table.name}.weight")
    ]
    return [value.local_shards()[0].tensor for value in found]


class TorchCollection(nn.Module):
    """An EmbeddingBagCollection of equal tables, in one torch EmbeddingBag."""

    def __init__(self, tables: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.tables = tables
        first = tables[0]
        self.embedding_bag = OneBag(first.num_embeddings, first.embedding_dim, len(tables), sparse=True)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.tables

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = self.embedding_bag(features.values().long(), features.offsets().long())
        widths = [table.embedding_dim for table in self.tables]
        return KeyedTensor(features.keys(), widths, pooled)


def plain_tables(ours: Trainable) -> list[EmbeddingBagConfig]:
    """The same tables without padding rows."""
    return [
        EmbeddingBagConfig(
            name=table.name,
            feature_names=[table.name],
            num_embeddings=table.num_ids,
            embedding_dim=table.embedding_dim,
        )
        for table in ours.tables
    ]


def draw_batch(shape: Shape, generator: np.random.Generator, num_rows: int) -> Batch:
    """``num_rows`` rows."""
    ids = draw_ids(generator, shape, shape.num_tables * num_rows).reshape(shape.num_tables, num_rows)
    dense = generator.standard_normal((num_rows, len(DENSE_COLUMNS)), dtype=np.float32)
    label = generator.integers(0, 2, num_rows).astype(np.float32)
    return Batch.from_columns(dense, ids.astype(np.int32), label, num_rows)


def measure(contenders: dict[str, Contender], batches: list[Batch], rounds: int) -> dict[str, Times]:
    """Raises AssertionError where the contenders are not the same model."""
    with torch.no_grad():
        logits = [each.model(batches[0].dense, batches[0].sparse) for each in contenders.values()]
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=1e-5)
    times: dict[str, Times] = {name: {} for name in contenders}
    for number in range(rounds + WARMUP_ROUNDS):
        for name, contender in contenders.items():
            phases = contender.time(batches[number % NUM_BATCHES])
            if number >= WARMUP_ROUNDS:
                for phase, milliseconds in phases.items():
                    times[name].setdefault(phase, []).append(milliseconds)
    return times


def measure_reader_and_metrics(shape: Shape, rounds: int, clock: Callable[[], float]) -> Times:
    """Of ``batch_size`` rows, out of two row groups as `prepare` writes them."""
    generator, times = np.random.default_rng(1), Times(reader=[], metrics=[])
    group_rows = 65_536
    rows = draw_batch(shape, generator, 2 * group_rows)
    columns = dict(zip(SPARSE_COLUMNS, rows.sparse.values().view(shape.num_tables, -1).numpy(), strict=True))
    columns |= dict(zip(DENSE_COLUMNS, rows.dense.numpy().T, strict=True))
    columns |= {LABEL_COLUMN: rows.label.numpy()}
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in PREPARED_SCHEMA]
    logits = generator.standard_normal(rows.num_rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        pq.write_table(pa.table(arrays, schema=PREPARED_SCHEMA), path, group_rows, compression="zstd")
        stream = BatchStream(list_row_groups([path]), shape.batch_size, shuffle=Shuffle(0, 0, window=2))
        for _ in range(rounds):
            begin = clock()
            num_batches = sum(1 for _ in stream)
            between = clock()
            click_metrics(rows.label.numpy(), logits)
            end = clock()
            times["reader"].append((between - begin) / num_batches * 1e3)
            times["metrics"].append((end - between) / num_batches * 1e3)
    return times


def report(
    times: dict[str, Times], rival: str, label: str, shape: Shape, clock: str
) -> list[dict[str, object]]:
    """A row for each contender and phase; speedup is empty where the rival has no such phase."""
    rows: list[dict[str, object]] = []
    for name, phases in times.items():
        for phase, ours in phases.items():
            theirs = times.get(rival, {}).get(phase)
            low, median, high = statistics.quantiles(ours, n=4)
            speedup = theirs and round(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)), 3)
            rows.append(
                {
                    "shape": label,
                    "threads": torch.get_num_threads(),
                    "phase": phase,
                    "contender": name,
                    "rival": rival,
                    "median_ms": round(median, 2),
                    "lower_quartile_ms": round(low, 2),
                    "upper_quartile_ms": round(high, 2),
                    "rows_per_s": round(shape.batch_size / median * 1e3),
                    "speedup": speedup,
                    "rounds": len(ours),
                    "clock": clock,
                    **machine_and_versions(),
                }
            )
            words = f"   speedup over {rival}: {speedup}" if speedup and name != rival else ""
            print(
                f"{label:26s} {torch.get_num_threads()} threads  {phase:8s} {name:18s} {median:8.2f} ms "
                f"{rows[-1]['rows_per_s']:9,} rows/s{words}",
                flush=True,
            )
    return rows


def main() -> None:
    """Time all pairs, or those of the small shape."""
    options, clock = parse_options(__doc__, "D = 16 alone, few rounds")
    silence_known_warnings()
    rounds = 5 if options.quick else options.rounds
    rows = []
    for label, shape in SHAPES.items():
        if options.quick and shape.width != 16:
            continue
        generator = np.random.default_rng(0)
        batches = [draw_batch(shape, generator, shape.batch_size) for _ in range(NUM_BATCHES)]
        with tempfile.TemporaryDirectory() as folder:
            for rival, rules in RIVALS.items():
                configs = {rule: make_config(shape, rule, options.threads, folder) for rule in rules}
                with start_runtime(configs["basis"].runtime) as runtime:
                    made = {
                        rule: make_ours(config, shape, runtime, clock) for rule, config in configs.items()
                    }
                    contenders = {rule: contender for rule, (contender, _) in made.items()}
                    contenders[rival] = make_rival(rival, configs["basis"], made["basis"][1], clock)
                    rows += report(measure(contenders, batches, rounds), rival, label, shape, options.clock)
                    del made, contenders
                    gc.collect()
        alone = {"basis": measure_reader_and_metrics(shape, max(2, rounds // 5), clock)}
        rows += report(alone, "", label, shape, options.clock)
        if options.output:
            write_rows(rows, options.output)


if __name__ == "__main__":
    main()
