"""``recsys-basis inspect PATH``: what a checkpoint holds, without building a model or running its code.

PATH is a checkpoint (.../checkpoints/step-N), or a run's folder: then its result, its checkpoints, and in
words, numbers and a plot what the row optimizer did to each table. Checksums of all files are verified;
exits with 1 if a file is missing or damaged.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table as Grid

from recsys_basis.checkpoints.folder import (
    RECORD_FILE,
    CheckpointError,
    Record,
    find_fault,
    list_checkpoints,
)
from recsys_basis.checkpoints.index import SafeReader, bytes_of
from recsys_basis.errors import UserError
from recsys_basis.report.run_diagnostics import NoDiagnosticsError, describe_run

USAGE = "usage: recsys-basis inspect PATH\n\n" + __doc__.partition("\n\n")[2]


def main(arguments: Sequence[str]) -> int:
    """Print what PATH holds; returns 0, 1 where something is wrong with it, or 2 for wrong arguments."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    path = Path(arguments[0])
    console = Console(width=max(80, Console().width))
    try:
        if (path / RECORD_FILE).exists():
            fault = show_checkpoint(console, path)
        elif (path / "checkpoints").is_dir():
            fault = show_run(console, path)
        else:
            fault = f"{path} is neither a checkpoint (it has no {RECORD_FILE}) nor a run's folder"
    except UserError as error:
        fault = str(error)
    if fault is not None:
        print(f"recsys-basis inspect: {fault}", file=sys.stderr)
    return 0 if fault is None else 1


def show_run(console: Console, path: Path) -> str | None:
    """The result of a run, if it has ended, its checkpoints, its diagnostics; returns what is damaged."""
    result = path / "result.json"
    if result.is_file():
        for key, value in json.loads(result.read_text()).items():
            console.print(f"{key} = {value}", highlight=False)
    else:
        console.print("no result.json: the run has not ended")
    grid = _grid("checkpoint", "step", "epoch", "batch", "evaluation", "files")
    faults = []
    for checkpoint in list_checkpoints(path / "checkpoints"):
        try:
            record = Record.read(checkpoint)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        progress, fault = record.progress, find_fault(checkpoint, record.sha256.items())
        faults += [fault] if fault else []
        values = (checkpoint.name, progress.step, progress.epoch, progress.batch, _evaluation(record))
        grid.add_row(*map(str, values), "damaged" if fault else "whole")
    console.print(grid)
    try:
        sentences, numbers = describe_run(path)
    except NoDiagnosticsError as reason:
        console.print(str(reason), highlight=False)
    else:
        console.print(
            *sentences, numbers, f"over time: {path / 'diagnostics.png'}", sep="\n", highlight=False
        )
    return "; ".join(faults) or None


def show_checkpoint(console: Console, path: Path) -> str | None:
    """Everything of one checkpoint; returns what is wrong with its files."""
    record = Record.read(path)
    progress = record.progress
    console.print(
        f"{path}\nstep {progress.step}, epoch {progress.epoch}, {progress.batch} batches of it done\n"
        f"evaluation: {_evaluation(record)}",
        highlight=False,
    )
    fault = find_fault(path, record.sha256.items())
    console.print(f"checksums of {len(record.sha256)} files: {'DAMAGED' if fault else 'valid'}")
    tensors = {
        key: (tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."), bytes_of(entry))
        for key, entry in SafeReader(path).tensors().items()
    }
    console.print(_tables(record, tensors), _by_owner(tensors))
    grid = _grid("must agree to resume", "value")
    for key, value in _leaves({key: value for key, value in record.layout.items() if key != "tables"}):
        grid.add_row(key, str(value))
    for key, value in _leaves({key: value for key, value in record.identity.items() if key != "vocabulary"}):
        grid.add_row(key, str(value))
    console.print(grid)
    return fault


Tensors = dict[str, tuple[tuple[int, ...], str, int]]
"""Shape, dtype and bytes of each tensor."""


def _tables(record: Record, tensors: Tensors) -> Grid:
    grid = _grid("table", "ids", "rows x D", "partitions", "dtype", "weights", "row optimizer state")
    for name, layout in record.layout["tables"].items():
        (weight,) = (value for key, value in tensors.items() if key.endswith(f".{name}.weight"))
        shape, dtype, size = weight
        state = sum(value[2] for key, value in tensors.items() if key.startswith(f"row_optimizer/{name}."))
        grid.add_row(
            name,
            f"{layout['num_ids']:,}",
            f"{shape[0]:,} x {shape[1]}",
            str(layout["num_partitions"]),
            dtype,
            decimal(size),
            decimal(state),
        )
    return grid


def _by_owner(tensors: Tensors) -> Grid:
    """Tensors of all tables or parameters together, by what keeps them and under which name."""
    groups: dict[tuple[str, str], list[tuple[tuple[int, ...], str, int]]] = defaultdict(list)
    for key, value in tensors.items():
        owner, _, rest = key.partition("/")
        name = {"row_optimizer": rest.rpartition(".")[2], "dense_optimizer": rest.rpartition("/")[2]}
        tables = "tables" if ".embedding_bags." in rest else "towers"
        groups[owner, name.get(owner, tables if owner == "model" else "")].append(value)
    grid = _grid("part", "state", "tensors", "dtype", "bytes", "")
    for (owner, state), values in sorted(groups.items()):
        total = sum(size for _, _, size in values)
        dtypes = ", ".join(sorted({dtype for _, dtype, _ in values}))
        grid.add_row(owner, state, str(len(values)), dtypes, f"{total:,}", decimal(total))
    return grid


def _evaluation(record: Record) -> str:
    if record.evaluation is None:
        return "none"
    return ", ".join(f"{key} {value:.5g}" for key, value in record.evaluation.items())


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _grid(*columns: str) -> Grid:
    grid = Grid()
    for number, column in enumerate(columns):
        grid.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return grid


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
