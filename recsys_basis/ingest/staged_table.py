"""SQL over the staged Parquet file of pass 1."""

from __future__ import annotations

import glob
from pathlib import Path

import duckdb
import pyarrow as pa


class StagedTable:
    """The rows of a Parquet file, in order; a query that outgrows memory spills beside the file."""

    def __init__(self, path: Path) -> None:
        self._connection = duckdb.connect(config={"temp_directory": str(path.parent / "spill")})
        # DuckDB takes a path for a glob pattern.
        self._pattern = glob.escape(str(path))

    def query(self, select: str, start: int, stop: int, rest: str = "") -> pa.Table:
        """SELECT ``select`` over rows [start, stop); ``rest`` may add conditions, groups and order."""
        relation = self._connection.sql(
            f"SELECT {select} FROM read_parquet($pattern, file_row_number = true) "
            f"WHERE file_row_number >= $start AND file_row_number < $stop {rest}",
            params={"pattern": self._pattern, "start": start, "stop": stop},
        )
        return relation.to_arrow_table()

    def count_positives(self, start: int, stop: int) -> int:
        """Rows of [start, stop) with label 1."""
        counts = self.query("count(*) AS positives", start, stop, "AND label = 1")
        return int(counts["positives"][0].as_py())
