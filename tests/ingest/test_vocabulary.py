from __future__ import annotations

import hashlib
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_basis.ingest.columns import DENSE_COLUMNS, SPARSE_COLUMNS, STAGED_SCHEMA
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.ingest.staged_table import StagedTable
from recsys_basis.ingest.vocabulary import VOCABULARY_SCHEMA, ColumnVocabulary, fit, vocabulary_digest


def staged_table(folder: Path, row_group_size: int = 5, **columns: list[int | None]) -> StagedTable:
    """A staged file in which the columns not given are missing throughout, and labels are 0."""
    num_rows = len(next(iter(columns.values())))
    fields = {field.name: pa.nulls(num_rows, field.type) for field in STAGED_SCHEMA}
    fields["label"] = pa.array([0] * num_rows, pa.int8())
    for name, values in columns.items():
        fields[name] = pa.array(values, STAGED_SCHEMA.field(name).type)
    path = folder / "staged.parquet"
    pq.write_table(pa.table(fields, schema=STAGED_SCHEMA), path, row_group_size=row_group_size)
    return StagedTable(path)


def vocabulary(values: list[int]) -> ColumnVocabulary:
    return ColumnVocabulary(np.array(values, np.uint32), np.ones(len(values), np.int64), 0, 0)


def test_ids_are_ordered_by_descending_count_then_value(tmp_path):
    values = [9, 9, 9, 2**32 - 1, 2**32 - 1, 5, 5, 0, 0, 7, None, None]
    column = fit(staged_table(tmp_path, C3=values), len(values), min_count=2).vocabularies["C3"]
    assert column.values.tolist() == [9, 0, 5, 2**32 - 1]
    assert column.counts.tolist() == [3, 2, 2, 2]
    assert (column.num_missing, column.num_rare, column.num_ids) == (2, 1, 5)
    assert column.id_counts().tolist() == [3, 3, 2, 2, 2]


@settings(max_examples=12, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.none(), st.integers(0, 12), st.integers(0, 2**32 - 1)), min_size=1, max_size=80
    ),
    train_share=st.floats(0.1, 1.0),
    min_count=st.integers(1, 4),
)
def test_fit_counts_the_training_part_as_a_counter_would(tmp_path_factory, values, train_share, min_count):
    num_rows = max(1, int(len(values) * train_share))
    table = staged_table(tmp_path_factory.mktemp("fit"), C1=values)
    column = fit(table, num_rows, min_count).vocabularies["C1"]
    counts = Counter(values[:num_rows])
    num_missing = counts.pop(None, 0)
    kept = sorted((value for value in counts if counts[value] >= min_count), key=lambda v: (-counts[v], v))
    assert column.values.tolist() == kept
    assert column.counts.tolist() == [counts[value] for value in kept]
    assert column.num_missing == num_missing
    assert column.num_rare == sum(count for count in counts.values() if count < min_count)
    ids = column.ids_of(pa.array(values, pa.uint32()))
    assert ids.tolist() == [kept.index(value) + 1 if value in kept else 0 for value in values]
    # On the training part, what the ids say is what was counted.
    assert np.bincount(ids[:num_rows], minlength=column.num_ids).tolist() == column.id_counts().tolist()


def test_missing_is_not_the_value_zero():
    ids = vocabulary([0, 8]).ids_of(pa.array([None, 0, 8, 9], pa.uint32()))
    assert ids.tolist() == [0, 1, 2, 0]
    assert ids.dtype == np.int32


def test_a_column_without_any_kept_value_has_id_0_alone(tmp_path):
    fitted = fit(staged_table(tmp_path, C1=[1, 2, None]), 3, min_count=2)
    for name in ("C1", "C2"):
        column = fitted.vocabularies[name]
        assert column.num_ids == 1
        assert column.ids_of(pa.array([1, None], pa.uint32())).tolist() == [0, 0]
    assert fitted.vocabularies["C1"].num_rare == 2
    assert fitted.vocabularies["C2"].num_missing == 3


def test_shifts_lift_the_smallest_training_integer_to_zero(tmp_path):
    table = staged_table(tmp_path, I1=[-3, None, 4, -9], I2=[5, 6, 7, -1], I3=[None, None, None, -5])
    shifts = fit(table, 3, min_count=1).integer_shifts
    assert shifts == {name: 0 for name in DENSE_COLUMNS} | {"I1": 3}
    assert fit(table, 4, min_count=1).integer_shifts["I1"] == 9


def test_saved_files_say_value_id_and_count(tmp_path):
    fitted = fit(staged_table(tmp_path, C2=[4, 4, 3, 3, 3, 1]), 6, min_count=2)
    files = fitted.save(tmp_path)
    assert list(files) == list(SPARSE_COLUMNS)
    table = pq.read_table(tmp_path / "vocabulary" / "C2.parquet")
    assert table.schema == VOCABULARY_SCHEMA
    assert table.to_pydict() == {"value": [3, 4], "id": [1, 2], "count": [3, 2]}
    assert (files["C2"].path, files["C2"].num_rows) == ("vocabulary/C2.parquet", 2)


@pytest.mark.parametrize("name", ["we[i]rd", "st*r ?", "it's"])
def test_sql_reads_just_its_own_file_whatever_the_folder_is_called(tmp_path, name):
    (tmp_path / name).mkdir()
    table = staged_table(tmp_path / name, I1=[1, 2, 3, 4, 5, 6, 7])
    assert table.query("I1", 2, 6)["I1"].to_pylist() == [3, 4, 5, 6]
    assert table.count_positives(0, 7) == 0


def test_a_digest_is_of_the_values_of_the_first_ids(prepared):
    manifest = Manifest.load(prepared)
    values = pq.read_table(prepared / "vocabulary" / "C3.parquet")["value"].to_pylist()
    for num_ids, known in ((None, values), (len(values) + 1, values), (3, values[:2]), (1, [])):
        expected = hashlib.sha256(struct.pack(f"<{len(known)}I", *known)).hexdigest()
        assert vocabulary_digest(manifest, prepared, "C3", num_ids) == expected
