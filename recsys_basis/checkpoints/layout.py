"""What must agree between a checkpoint and a run, and the one difference that may be: more rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recsys_basis.tables import Table
from recsys_basis.training.build import Trainable

LAYOUT_FIELDS = ("num_ids", "embedding_dim", "num_partitions")


def layout_of(trainable: Trainable) -> dict[str, Any]:
    """What must agree for the tensors to mean the same; rates and clips may change between the two."""
    config = trainable.config.model_dump(mode="json")
    free = {"learning_rate", "weight_decay", "clip"}
    dense = {key: value for key, value in config["dense_optimizer"].items() if key not in free}
    rows = {
        name: each.model_dump(mode="json", exclude=free)
        for name, each in trainable.row_optimizer_of_table.items()
    }
    # Named once where most tables share it, so that a refusal does not repeat itself for each table.
    usual = max(rows.values(), key=list(rows.values()).count)
    tables = {
        table.name: {field: getattr(table, field) for field in LAYOUT_FIELDS} for table in trainable.tables
    }
    for name, blocks in trainable.column_blocks().items():
        tables[name]["column_blocks"] = blocks
    return {
        "tables": tables,
        "model": config["model"],
        "pooling": config["embedding"]["pooling"],
        "weight_dtype": config["embedding"]["weight_dtype"],
        # C++ and plain PyTorch keep the same state: a run may go on with the other.
        "kernel": "fbgemm" if config["embedding"]["kernel"] == "fbgemm" else "recsys_basis",
        "row_optimizer": usual,
        "table_row_optimizers": {name: each for name, each in rows.items() if each != usual},
        "dense_optimizer": dense,
        "tower_average_decay": config["tower_average_decay"],
    }


def grown_tables(saved: dict[str, Any], tables: tuple[Table, ...]) -> dict[str, Table]:
    """By name, the saved form of each of ``tables`` that has more ids now than in the layout ``saved``.

    Partitions follow from the number of ids, so there may be more of them, too. Width is another model.
    """
    old = {
        name: Table(name, **{field: fields[field] for field in LAYOUT_FIELDS})
        for name, fields in saved["tables"].items()
    }
    return {
        table.name: old[table.name]
        for table in tables
        if table.name in old
        and old[table.name].num_ids < table.num_ids
        and old[table.name].embedding_dim == table.embedding_dim
    }


def differences(saved: Any, current: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, saved value, value now) of each leaf that differs."""
    if isinstance(saved, dict) and isinstance(current, dict):
        for name in {**saved, **current}:
            inner = f"{key}.{name}" if key else name
            yield from differences(saved.get(name), current.get(name), inner)
    elif saved != current:
        yield key, saved, current
