"""Time one step of each dense optimizer on a DLRM's towers, against torch's AdamW with foreach.

    python scripts/bench_dense_optimizers.py --output benchmarks/dense_optimizers.csv
    python scripts/bench_dense_optimizers.py --compile

The towers are 13-512-256-64-16 and 367-512-256-1 (16 dimensions and the 351 interactions of 27 vectors),
about 475 thousand weights. All optimizers step in turn, in an order that is shuffled every round, so that a
busy machine slows all of them alike. Times are wall-clock or, with --clock cpu, of the calling thread
alone, which other processes disturb less; the latter is only right for one thread. The table gives medians,
the middle half of the steps, and ratios of medians. Gradients are standard normal and stay the same. Where
the early phase of Balanced Adam is timed, it is made endless.

With --compile the steps that torch.compile takes (``COMPILED``) are compiled before they are timed, and the
graphs and graph breaks of each are printed; TorchInductor needs a C++ compiler, and minutes.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recsys_basis.dense_optimizers import create_dense_optimizer, dense_optimizer_defaults
from recsys_basis.metrics.resources import optimizer_state_bytes

FOREVER = 10**9
ENDLESS: dict[str, Any] = {"early_steps": FOREVER, "mask_steps": 0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {}),
    "sm3": ("sm3", {}),
    "sm3 without momentum": ("sm3", {"momentum": 0.0}),
    "sm3 without momentum, I": ("sm3", {"momentum": 0.0, "variant": "I"}),
    "sm3 without momentum, max": ("sm3", {"momentum": 0.0, "variant": "max"}),
    "sm3 bfloat16 momentum": ("sm3", {"bfloat16_momentum": True}),
    "sm3 beta2": ("sm3", {"beta2": 0.999}),
    "balanced_adam after its early phase": ("balanced_adam", {"early_steps": 0}),
    "balanced_adam early, masks": ("balanced_adam", {}),
    "balanced_adam early, no masks": ("balanced_adam", ENDLESS),
    "balanced_adam early, cluster": ("balanced_adam", ENDLESS | {"groups": "cluster"}),
    "balanced_adam rebalancing": (
        "balanced_adam",
        {"early_steps": 0, "rebalancing": True, "rebalance_start": 0, "rebalance_end": FOREVER},
    ),
    "balanced_adam early, masks, torch": ("balanced_adam", {"kernel": "torch"}),
    "balanced_adam early, cluster, torch": (
        "balanced_adam",
        ENDLESS | {"groups": "cluster", "kernel": "torch"},
    ),
    "balanced_adam early, half of V's components": ("balanced_adam", ENDLESS | {"kept_components": 0.5}),
    "adafactor": ("adafactor", {}),
    "sgd": ("sgd", {}),
    "nadam": ("nadam", {}),
    "radam": ("radam", {}),
}
COMPILED = (
    "adamw",
    "sm3",
    "sm3 beta2",
    "balanced_adam after its early phase",
    "balanced_adam early, masks",
    "balanced_adam early, no masks",
    "balanced_adam early, cluster",
    "balanced_adam rebalancing",
)
Times = dict[str, list[float]]
WARMUP_ROUNDS = 5
"""They allocate state, or compile, and are not counted."""


def towers() -> nn.Module:
    """Both towers with a gradient."""
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes) for sizes in ((13, 512), (512, 256), (256, 64), (64, 16))]
    layers += [nn.Linear(*sizes) for sizes in ((367, 512), (512, 256), (256, 1))]
    model = nn.ModuleList(layers)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def make(variant: str) -> Optimizer:
    """The optimizer of a row of ``VARIANTS``, on towers of its own."""
    name, options = VARIANTS[variant]
    return create_dense_optimizer(dense_optimizer_defaults(name, **options), towers())


def measure(optimizers: dict[str, Optimizer], rounds: int, clock: Callable[[], float]) -> Times:
    """Milliseconds of every timed step of each variant."""
    times: Times = {variant: [] for variant in optimizers}
    order = list(optimizers)
    shuffler = random.Random(0)
    for _ in range(rounds + WARMUP_ROUNDS):
        shuffler.shuffle(order)
        for variant in order:
            start = clock()
            optimizers[variant].step()
            times[variant].append((clock() - start) * 1e3)
            _stay_masked(optimizers[variant])
    return {variant: each[WARMUP_ROUNDS:] for variant, each in times.items()}


def _stay_masked(optimizer: Optimizer) -> None:
    """Masks end after 20 steps: set the count of steps back before."""
    for group in optimizer.param_groups:
        if group.get("mask_steps", 0) > 0 and group["early_steps"] > 0:
            group["steps_taken"] = min(group["steps_taken"], 10)


def report(times: Times) -> list[dict[str, object]]:
    """A row for each variant."""
    baseline = statistics.median(times["adamw"])
    rows: list[dict[str, object]] = []
    for variant, each in times.items():
        low, median, high = statistics.quantiles(each, n=4)
        optimizer = make(variant)
        optimizer.step()
        rows.append(
            {
                "variant": variant,
                "median_ms": round(median, 3),
                "lower_quartile_ms": round(low, 3),
                "upper_quartile_ms": round(high, 3),
                "ratio_to_adamw": round(median / baseline, 2),
                "state_bytes": optimizer_state_bytes(optimizer),
                "rounds": len(each),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
        )
    return rows


def make_compiled(variant: str) -> Optimizer:
    """As ``make``, with a compiled step; prints its graphs, recompilations included, and graph breaks."""
    from torch._dynamo.utils import counters

    optimizer = make(variant)
    optimizer.step()
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[assignment,method-assign]
    counters.clear()
    for _ in range(4):
        optimizer.step()
        _stay_masked(optimizer)
    # torch's Adam asks for one break around its step, which every compiled call of it has.
    breaks = sum(counters["graph_break"].values())
    print(f"{variant:40s} graphs {counters['stats']['unique_graphs']}, graph breaks {breaks}", flush=True)
    return optimizer


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="timed steps of each optimizer")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="see above")
    parser.add_argument("--output", type=Path, help="CSV file to write")
    parser.add_argument("--compile", action="store_true", help="compiled steps instead")
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads > 1:
        parser.error("--clock cpu does not see the other threads: use --threads 1")
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.clock == "cpu" else time.perf_counter
    if options.compile:
        torch._dynamo.config.recompile_limit = 8 * len(COMPILED)  # of a function that all optimizers share
        optimizers = {variant: make_compiled(variant) for variant in COMPILED}
    else:
        optimizers = {variant: make(variant) for variant in VARIANTS}
    times = measure(optimizers, options.rounds, clock)
    rows = [row | {"clock": options.clock, "compiled": options.compile} for row in report(times)]
    print(
        f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds, {options.clock} time"
    )
    for row in rows:
        print(
            f"{row['variant']:46s} {row['median_ms']:8.3f} ms "
            f"({row['lower_quartile_ms']:.3f} to {row['upper_quartile_ms']:.3f})  "
            f"{row['ratio_to_adamw']:6.2f} x  {row['state_bytes']:>10,} bytes"
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
