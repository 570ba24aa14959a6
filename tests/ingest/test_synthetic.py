from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from recsys_basis.ingest import synthetic, teacher
from recsys_basis.ingest.errors import DataError
from recsys_basis.ingest.spec import DatasetConfig, SyntheticConfig
from recsys_basis.ingest.synthetic import SyntheticReport, read_truth, synthesize
from recsys_basis.ingest.teacher import Clicks, Teacher
from recsys_basis.prepare import prepare


@pytest.fixture
def synthetic_config(tmp_path) -> SyntheticConfig:
    return SyntheticConfig(
        path=str(tmp_path / "new" / "clicks.tsv"),
        rows=5000,
        seed=3,
        zipf_exponent=1.1,
        cardinality_scale=0.001,
        click_rate=0.256,
        value_effect=1.0,
        pair_effect=0.7,
        integer_effect=0.6,
        pair_rank=4,
        num_pairs=20,
        test_fraction=0.2,
        overwrite=False,
    )


@pytest.fixture(autouse=True)
def small_pilot(monkeypatch) -> None:
    monkeypatch.setattr(teacher, "PILOT_ROWS", 5000)


@pytest.fixture
def drawn(monkeypatch) -> list[Clicks]:
    """Collects what teachers draw, chunks of 1,000 rows at a time."""
    chunks: list[Clicks] = []
    draw = Teacher.draw

    def collect(self: Teacher, num_rows: int, rng: np.random.Generator) -> Clicks:
        chunks.append(draw(self, num_rows, rng))
        return chunks[-1]

    monkeypatch.setattr(Teacher, "draw", collect)
    monkeypatch.setattr(synthetic, "CHUNK_ROWS", 1000)
    return chunks


def auc_over_all_pairs(labels: np.ndarray, scores: np.ndarray) -> float:
    """The share of (click, no click) pairs in which the click has the larger score; ties count half."""
    difference = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def test_the_bayes_numbers_are_those_of_the_true_probabilities(synthetic_config, drawn, capsys):
    report = synthesize(synthetic_config)
    labels = np.concatenate([chunk.labels for chunk in drawn])[-1000:]
    truth = np.concatenate([chunk.probabilities for chunk in drawn])[-1000:]
    assert report.bayes_auc == pytest.approx(auc_over_all_pairs(labels, truth), abs=1e-12)
    losses = [-math.log(p if label else 1 - p) for label, p in zip(labels, truth, strict=True)]
    assert report.bayes_log_loss == pytest.approx(sum(losses) / 1000, rel=1e-9)
    assert 0.76 < report.bayes_auc < 0.86
    assert report.num_test_rows == 1000
    assert (
        f"Bayes AUC {report.bayes_auc:.4f} and log loss {report.bayes_log_loss:.4f}"
        in capsys.readouterr().out
    )


def test_the_file_holds_what_was_drawn_and_prepare_reads_it(synthetic_config, drawn, tmp_path):
    report = synthesize(synthetic_config)
    lines = Path(synthetic_config.path).read_text().splitlines()
    assert len(lines) == report.num_rows == 5000
    rows = [row for chunk in drawn for row in zip(*(c.to_pylist() for c in chunk.table.columns), strict=True)]
    assert lines == ["\t".join("" if value is None else str(value) for value in row) for row in rows]
    values = {(place, row[place]) for row in rows for place in range(14, 40) if row[place] is not None}
    assert report.num_distinct_values == len(values)
    assert report.num_clicks == sum(row[0] for row in rows)
    assert len(set(rows)) == len(rows)

    manifest = prepare(
        DatasetConfig(
            format="criteo_kaggle",
            raw_paths=(synthetic_config.path,),
            prepared_dir=str(tmp_path / "prepared"),
            vocabulary_from=None,
            min_count=1,
            test_fraction=0,
            on_bad_line="error",
            overwrite=False,
            row_group_rows=1000,
        )
    )
    assert manifest.splits["train"].num_positives == report.num_clicks
    assert sum(manifest.cardinalities.values()) - 26 == report.num_distinct_values
    assert manifest.integer_shifts["I2"] == 2


def test_the_truth_lies_beside_the_file(synthetic_config):
    report = synthesize(synthetic_config)
    text = Path(synthetic_config.path + ".truth.json").read_text()
    assert SyntheticReport.model_validate_json(text) == report
    assert json.loads(text)["config"]["seed"] == 3


def test_one_config_gives_the_same_bytes_and_another_seed_does_not(synthetic_config, tmp_path):
    def written(name: str, seed: int) -> bytes:
        path = tmp_path / name
        synthesize(synthetic_config.model_copy(update={"path": str(path), "seed": seed}))
        return path.read_bytes()

    first, again, other = written("1.tsv.gz", 3), written("2.tsv.gz", 3), written("3.tsv.gz", 4)
    assert first == again != other
    # Bytes 4 to 7 of a gzip header are the time of writing.
    assert first[4:8] == bytes(4)
    assert gzip.decompress(first) == written("plain.tsv", 3)


def test_an_existing_file_is_refused_and_kept_until_the_new_one_is_done(synthetic_config, monkeypatch):
    synthesize(synthetic_config)
    path = Path(synthetic_config.path)
    old = path.read_bytes()
    with pytest.raises(
        DataError, match=r"clicks\.tsv already exists: name another path, or set overwrite=true"
    ):
        synthesize(synthetic_config)
    new = synthetic_config.model_copy(update={"overwrite": True, "seed": 9})
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(synthetic, "roc_auc_score", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
        synthesize(new)
    assert path.read_bytes() == old
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["clicks.tsv", "clicks.tsv.truth.json"]
    synthesize(new)
    assert path.read_bytes() != old


def test_a_test_part_of_one_class_is_an_error(synthetic_config):
    config = synthetic_config.model_copy(update={"click_rate": 1e-7, "rows": 100})
    with pytest.raises(DataError, match="the last 20 rows have one class only: raise rows or click_rate"):
        synthesize(config)
    assert list(Path(config.path).parent.iterdir()) == []


def test_the_truth_is_read_back_for_the_settings_it_was_drawn_with(synthetic_config):
    with pytest.raises(
        DataError, match=r"truth\.json cannot be read .*: run `recsys-basis synthesize` again"
    ):
        read_truth(synthetic_config)
    report = synthesize(synthetic_config)
    assert read_truth(synthetic_config.model_copy(update={"overwrite": True})) == report
    with pytest.raises(DataError, match="was drawn with another rows, seed: name another path, or remove it"):
        read_truth(synthetic_config.model_copy(update={"seed": 4, "rows": 6000}))
    Path(synthetic_config.path + ".truth.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        read_truth(synthetic_config)
