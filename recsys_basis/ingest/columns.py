"""The columns of a Criteo click log, and their types at each stage of the preparation.

A raw line has 40 tab-separated fields: the label (0 or 1), 13 integers I1..I13, and 26
categorical values C1..C26 of up to 8 hex digits. An empty field is a missing value.
"""

from __future__ import annotations

import pyarrow as pa

LABEL_COLUMN = "label"
DENSE_COLUMNS = tuple(f"I{number}" for number in range(1, 14))
SPARSE_COLUMNS = tuple(f"C{number}" for number in range(1, 27))
RAW_COLUMNS = (LABEL_COLUMN, *DENSE_COLUMNS, *SPARSE_COLUMNS)
"""Names of the fields of a raw line, in order."""


def _schema(dense: pa.DataType, sparse: pa.DataType, nullable: bool) -> pa.Schema:
    return pa.schema(
        [pa.field(LABEL_COLUMN, pa.int8(), nullable=False)]
        + [pa.field(name, dense, nullable=nullable) for name in DENSE_COLUMNS]
        + [pa.field(name, sparse, nullable=nullable) for name in SPARSE_COLUMNS]
    )


STAGED_SCHEMA = _schema(pa.int64(), pa.uint32(), nullable=True)
"""Raw values as numbers; missing is null."""

PREPARED_SCHEMA = _schema(pa.float32(), pa.int32(), nullable=False)
"""What training reads: log1p(I + shift), ids of C; missing is 0.0 and id 0."""
