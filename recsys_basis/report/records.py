"""What a finished run hands to the comparison: its result, and its predictions on the test rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_basis.atomic import written_whole
from recsys_basis.metrics.click import ClickMetrics

PREDICTIONS_FILE = "test_predictions.parquet"
PREDICTIONS_SCHEMA = pa.schema(
    [pa.field("label", pa.int8(), nullable=False), pa.field("logit", pa.float32(), nullable=False)]
)


def whole_lines(path: Path) -> list[str]:
    """Lines of a log, without what follows the last one's end: it is being written, or was when killed."""
    return path.read_text().split("\n")[:-1]


@dataclass(frozen=True)
class RunRecord:
    """One training run of ``variant`` with ``seed``, ended and evaluated on the test rows."""

    variant: str
    seed: int
    learning_rate: float
    metrics: ClickMetrics
    optimizer_bytes: int
    """State of the embedding rows' optimizer, all ranks together."""
    dense_optimizer_bytes: int
    weight_bytes: int
    """Weights of the embedding tables, all ranks together."""
    rows_per_second: float | None
    """None where the run was too short to measure."""
    peak_memory_bytes: int
    loss_jitter: float | None
    """Unsteadiness of the first steps (metrics/jitter.py); None where they were not all seen."""
    run_dir: Path

    def predictions(self) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Read (labels [n], logits [n]) of this run's test rows from ``run_dir``."""
        return read_predictions(self.run_dir)


def write_predictions(run_dir: Path, labels: NDArray[np.int8], logits: NDArray[np.float32]) -> Path:
    """Write ``labels`` [n] and ``logits`` [n] of the test rows, in their order, into ``run_dir``."""
    path = run_dir / PREDICTIONS_FILE
    table = pa.table({"label": labels, "logit": logits}, schema=PREDICTIONS_SCHEMA)
    with written_whole(path) as temporary:
        pq.write_table(table, temporary)
    return path


def read_predictions(run_dir: Path) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Inverse of ``write_predictions``.

    Raises FileNotFoundError where the run left no predictions, ValueError for other columns or types.
    """
    path = run_dir / PREDICTIONS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: run this training again, or leave it out of the comparison"
        )
    table = pq.read_table(path)
    if not table.schema.equals(PREDICTIONS_SCHEMA):
        found = ", ".join(f"{field.name} {field.type}" for field in table.schema)
        raise ValueError(f"{path} has columns {found}: expected label int8, logit float32, neither nullable")
    return table["label"].to_numpy(), table["logit"].to_numpy()
