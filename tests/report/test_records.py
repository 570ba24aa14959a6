"""Predictions on disk: what is written is read, and anything else is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recsys_basis.report.records import read_predictions, whole_lines, write_predictions


def test_round_trip_keeps_order_type_and_bits(tmp_path: Path) -> None:
    labels = np.array([1, 0, 0, 1], np.int8)
    logits = np.array([0.1, -17.5, 1e-30, 3.0], np.float32)
    path = write_predictions(tmp_path, labels, logits)
    assert path == tmp_path / "test_predictions.parquet"
    read_labels, read_logits = read_predictions(tmp_path)
    assert read_labels.dtype == np.int8
    assert read_logits.dtype == np.float32
    np.testing.assert_array_equal(read_labels, labels)
    np.testing.assert_array_equal(read_logits, logits)
    frame = pd.read_parquet(path)
    assert list(frame.columns) == ["label", "logit"]
    assert frame["logit"].tolist() == logits.tolist()


def test_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"test_predictions.parquet is missing: run this training again"
    ):
        read_predictions(tmp_path)


@pytest.mark.parametrize(
    "columns",
    [
        {"label": np.zeros(2, np.int8), "probability": np.zeros(2, np.float32)},
        {"label": np.zeros(2, np.int64), "logit": np.zeros(2, np.float32)},
        {"label": np.zeros(2, np.int8), "logit": np.zeros(2, np.float64)},
    ],
)
def test_other_columns_are_refused(tmp_path: Path, columns: dict[str, np.ndarray]) -> None:
    pd.DataFrame(columns).to_parquet(tmp_path / "test_predictions.parquet")
    with pytest.raises(ValueError, match="expected label int8, logit float32"):
        read_predictions(tmp_path)


@pytest.mark.parametrize(
    ("labels", "logits", "message"),
    [
        (np.zeros(2, np.int8), np.zeros(3, np.float32), "expected length 2"),
        (np.array([0, 300]), np.zeros(2, np.float32), "300"),
    ],
)
def test_nothing_is_left_of_predictions_that_do_not_fit(
    tmp_path: Path, labels: np.ndarray, logits: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_predictions(tmp_path, labels, logits)
    assert list(tmp_path.iterdir()) == []


def test_a_line_without_its_end_is_none(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    for text, lines in (("", []), ("one\n", ["one"]), ("one\ntwo\nthr", ["one", "two"])):
        log.write_text(text)
        assert whole_lines(log) == lines
