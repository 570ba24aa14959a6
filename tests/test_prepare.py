from __future__ import annotations

import csv
import gzip
import hashlib
import json
import logging
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_basis import prepare as prepare_module
from recsys_basis.ingest.columns import DENSE_COLUMNS, PREPARED_SCHEMA, RAW_COLUMNS, SPARSE_COLUMNS
from recsys_basis.ingest.errors import BadLine, DataError
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.ingest.spec import DatasetConfig
from recsys_basis.ingest.vocabulary import Fitted
from recsys_basis.prepare import ensure_prepared, prepare, split_by_time


def dataset(folder: Path, raw: Path | list[Path], **changes: object) -> DatasetConfig:
    paths = raw if isinstance(raw, list) else [raw]
    settings = {
        "format": "criteo_kaggle",
        "raw_paths": tuple(str(path) for path in paths),
        "prepared_dir": str(folder / "prepared"),
        "vocabulary_from": None,
        "min_count": 2,
        "test_fraction": 0.2,
        "on_bad_line": "error",
        "overwrite": False,
        "row_group_rows": 65536,
    }
    return DatasetConfig(**settings | changes)


def make_lines(num_lines: int, seed: int = 0) -> list[bytes]:
    """Good lines with few values, so that ids repeat; every 4th is a click."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(num_lines):
        integers = [b"%d" % value for value in rng.integers(-2, 30, 13)]
        ids = [b"%x" % value if value else b"" for value in rng.integers(0, 6, 26)]
        lines.append(b"\t".join([b"%d" % (number % 4 == 0), *integers, *ids]) + b"\n")
    return lines


def write(path: Path, data: bytes | list[bytes]) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else b"".join(data))
    return path


def read(config: DatasetConfig, split: str) -> pa.Table:
    files = sorted(Path(config.prepared_dir, split).glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def oracle(texts: list[list[str]], test_fraction: float, min_count: int) -> dict[str, dict[str, list[float]]]:
    """The whole preparation on lists of fields, one value at a time: {split: {column: values}}."""
    num_test = round(len(texts) * test_fraction)
    train = texts[: len(texts) - num_test]
    columns: dict[str, list[float]] = {}
    for place, name in enumerate(RAW_COLUMNS):
        values = [text[place] for text in texts]
        seen = [text[place] for text in train if text[place]]
        if place == 0:
            columns[name] = [int(value) for value in values]
        elif place <= 13:
            shift = max(0, -min((int(value) for value in seen), default=0))
            columns[name] = [math.log1p(max(int(value) + shift, 0)) if value else 0.0 for value in values]
        else:
            counts = Counter(int(value, 16) for value in seen)
            kept = sorted((-count, value) for value, count in counts.items() if count >= min_count)
            ids = {value: index + 1 for index, (_, value) in enumerate(kept)}
            columns[name] = [ids.get(int(value, 16), 0) if value else 0 for value in values]
    cut = len(train)
    return {
        "train": {name: values[:cut] for name, values in columns.items()},
        "test": {name: values[cut:] for name, values in columns.items()},
    }


def check_against_oracle(config: DatasetConfig, texts: list[list[str]]) -> None:
    expected = oracle(texts, config.test_fraction, config.min_count)
    for split in ("train", "test"):
        table = read(config, split)
        assert table.schema == PREPARED_SCHEMA
        for name in ("label", *SPARSE_COLUMNS):
            assert table[name].to_pylist() == expected[split][name], (split, name)
        for name in DENSE_COLUMNS:
            np.testing.assert_allclose(table[name].to_numpy(), expected[split][name], rtol=1e-6, err_msg=name)


def read_tsv(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize("min_count, test_fraction", [(2, 0.2), (10, 0.333)])
def test_real_lines_against_an_oracle_in_plain_python(real_data, tmp_path, min_count, test_fraction):
    path = real_data / "criteo" / "kaggle_first_10k.tsv.gz"
    config = dataset(tmp_path, path, min_count=min_count, test_fraction=test_fraction, row_group_rows=1000)
    manifest = prepare(config)
    texts = read_tsv(path)
    check_against_oracle(config, texts)
    num_test = round(10_000 * test_fraction)
    labels = [int(text[0]) for text in texts]
    assert (manifest.splits["train"].num_rows, manifest.splits["test"].num_rows) == (
        10_000 - num_test,
        num_test,
    )
    assert manifest.splits["train"].num_positives == sum(labels[:-num_test])
    assert manifest.splits["test"].num_positives == sum(labels[-num_test:])
    for name in SPARSE_COLUMNS:
        ids = read(config, "train")[name].to_numpy()
        assert manifest.cardinalities[name] == ids.max() + 1
        counts = manifest.vocabulary.columns[name]
        assert counts.num_missing + counts.num_rare == (ids == 0).sum()


def test_golden_facts_of_the_real_sample(real_data, tmp_path):
    path = real_data / "criteo" / "kaggle_137k.tsv.gz"
    everything = prepare(dataset(tmp_path / "all", path, min_count=1, test_fraction=0))
    num_rows = 137_139
    assert everything.splits["train"].num_rows == num_rows
    assert everything.splits["train"].num_positives / num_rows == pytest.approx(0.257, abs=0.0005)
    # Distinct (column, value) pairs; every column counts id 0 besides.
    assert sum(everything.cardinalities.values()) - 26 == 316_179
    assert everything.integer_shifts == {name: 0 for name in DENSE_COLUMNS} | {"I2": 2}
    missing = {
        name: round(everything.vocabulary.columns[name].num_missing / num_rows, 2) for name in SPARSE_COLUMNS
    }
    assert missing["C22"] == 0.76
    assert {missing[name] for name in ("C19", "C20", "C25", "C26")} == {0.44}
    assert all(counts.num_rare == 0 for counts in everything.vocabulary.columns.values())
    table = read(dataset(tmp_path / "all", path), "train")
    largest = max(table[name].to_numpy().max() for name in DENSE_COLUMNS)
    assert largest == pytest.approx(math.log1p(2_071_071), rel=1e-6)

    twice = prepare(dataset(tmp_path / "twice", path, min_count=2, test_fraction=0))
    assert sum(twice.cardinalities.values()) - 26 == 76_004

    split = prepare(dataset(tmp_path / "split", path))
    assert (split.splits["train"].num_rows, split.splits["test"].num_rows) == (109_711, 27_428)
    groups = pq.ParquetFile(tmp_path / "split" / "prepared" / "train" / "part-00000.parquet").metadata
    assert [groups.row_group(k).num_rows for k in range(groups.num_row_groups)] == [65_536, 44_175]
    assert names(tmp_path / "split") == ["prepared"]


def test_the_real_unlabelled_file_is_refused_for_training(real_data, tmp_path):
    path = real_data / "criteo" / "kaggle_unlabelled_1k.tsv"
    for policy in ("error", "skip", "pad"):
        with pytest.raises(DataError, match=r"kaggle_unlabelled_1k\.tsv looks unlabelled"):
            prepare(dataset(tmp_path, path, on_bad_line=policy))
    assert names(tmp_path) == []


def test_the_real_short_lines_do_the_right_thing_under_each_policy(real_data, tmp_path):
    path = real_data / "criteo" / "kaggle_short_lines_1k.tsv"
    lines = path.read_text().splitlines()
    first_short = next(number for number, line in enumerate(lines, 1) if line.count("\t") < 39)
    with pytest.raises(
        BadLine, match=rf"kaggle_short_lines_1k.tsv line {first_short}: 3[78] columns instead of 40"
    ):
        prepare(dataset(tmp_path, path))
    assert names(tmp_path) == []

    skipping = prepare(dataset(tmp_path / "skip", path, on_bad_line="skip"))
    assert skipping.bad_lines.wrong_column_count == skipping.bad_lines.num_skipped == 498
    assert sum(split.num_rows for split in skipping.splits.values()) == 502

    config = dataset(tmp_path / "pad", path, on_bad_line="pad")
    padding = prepare(config)
    assert (padding.bad_lines.padded, padding.bad_lines.num_skipped) == (498, 0)
    check_against_oracle(config, [(line + "\t" * (39 - line.count("\t"))).split("\t") for line in lines])


def test_the_real_terabyte_lines_shift_every_column_that_goes_negative(real_data, tmp_path):
    path = real_data / "criteo" / "terabyte_1k.tsv.gz"
    config = dataset(tmp_path, path, format="criteo_terabyte")
    manifest = prepare(config)
    texts = read_tsv(path)
    check_against_oracle(config, texts)
    smallest = {
        name: min(int(text[place]) for text in texts[:800] if text[place])
        for place, name in enumerate(DENSE_COLUMNS, 1)
    }
    assert min(smallest.values()) < 0
    assert manifest.integer_shifts == {name: max(0, -value) for name, value in smallest.items()}


def test_plain_gzip_and_several_files_give_the_same_rows(tmp_path):
    lines = make_lines(60)
    plain = dataset(tmp_path / "a", write(tmp_path / "a.tsv", lines))
    one, two = (
        write(tmp_path / "1.tsv", lines[:37]),
        write(tmp_path / "2.gz", gzip.compress(b"".join(lines[37:]))),
    )
    several = dataset(tmp_path / "b", [one, two])
    windows = dataset(tmp_path / "c", write(tmp_path / "c.tsv", b"".join(lines).replace(b"\n", b"\r\n")[:-2]))
    prepare(plain)
    for config in (several, windows):
        manifest = prepare(config)
        for split in ("train", "test"):
            assert read(config, split).equals(read(plain, split))
        assert sum(source.num_lines for source in manifest.sources) == 60


def test_the_order_of_files_is_the_order_of_time(tmp_path):
    lines = make_lines(20)
    one, two = write(tmp_path / "1.tsv", lines[:16]), write(tmp_path / "2.tsv", lines[16:])
    forward, backward = dataset(tmp_path / "f", [one, two]), dataset(tmp_path / "b", [two, one])
    prepare(forward)
    prepare(backward)
    expected = [float(line.split(b"\t")[0]) for line in (lines[16:] + lines[:16])[16:]]
    assert read(backward, "test")["label"].to_pylist() == expected
    assert read(forward, "test")["label"].to_pylist() == [int(line[:1]) for line in lines[16:]]


def test_vocabulary_and_shifts_come_from_the_training_part_only(tmp_path):
    lines = make_lines(20)
    # The test part holds a value, often, and an integer, small, that training never saw.
    lines[16:] = [b"0\t-50" + b"\t1" * 12 + b"\tdeadbeef" * 26 + b"\n"] * 4
    config = dataset(tmp_path, write(tmp_path / "raw.tsv", lines))
    manifest = prepare(config)
    test = read(config, "test")
    assert {value for name in SPARSE_COLUMNS for value in test[name].to_pylist()} == {0}
    assert test["I1"].to_pylist() == [0.0] * 4
    assert 0 <= manifest.integer_shifts["I1"] <= 2
    assert max(manifest.cardinalities.values()) <= 6


def test_a_vocabulary_is_reused_for_later_files(tmp_path):
    first = dataset(tmp_path / "1", write(tmp_path / "1.tsv", make_lines(100)))
    earlier = prepare(first)
    lines = make_lines(40, seed=1)
    lines[0] = b"1\t-9" + b"\t5" * 12 + b"\tabcdef" * 26 + b"\n"
    later = dataset(
        tmp_path / "2", write(tmp_path / "2.tsv", lines), vocabulary_from=first.prepared_dir, test_fraction=0
    )
    manifest = prepare(later)
    assert manifest.integer_shifts == earlier.integer_shifts
    assert manifest.cardinalities == earlier.cardinalities
    assert manifest.vocabulary == earlier.vocabulary
    assert set(manifest.splits) == {"train", "test"}
    assert (manifest.splits["train"].num_rows, manifest.splits["test"].num_rows) == (40, 0)
    fitted = Fitted.load(first.prepared_dir)
    table = read(later, "train")
    for place, name in enumerate(SPARSE_COLUMNS, 14):
        ids = {value: index + 1 for index, value in enumerate(fitted.vocabularies[name].values.tolist())}
        texts = [line.strip(b"\n").split(b"\t")[place] for line in lines]
        assert table[name].to_pylist() == [ids.get(int(text, 16), 0) if text else 0 for text in texts]
        assert table[name][0].as_py() == 0
    assert table["I1"][0].as_py() == 0.0
    # The copy stands on its own, and can be reused in turn.
    for file in manifest.vocabulary_files.values():
        file.verify(later.prepared_dir)
    copied = Fitted.load(later.prepared_dir)
    assert copied.min_count == 2 and copied.num_rows == 80
    assert ensure_prepared(later) == manifest


def test_a_vocabulary_that_does_not_fit_is_refused_at_once(tmp_path):
    raw = write(tmp_path / "raw.tsv", make_lines(20))
    first = dataset(tmp_path / "1", raw)
    prepare(first)
    later = {"vocabulary_from": first.prepared_dir}
    with pytest.raises(DataError, match="fitted with min_count=2, the config says 3: set min_count=2"):
        prepare(dataset(tmp_path / "2", raw, min_count=3, **later))
    with pytest.raises(
        DataError, match="is of format=criteo_kaggle, this data set of format=criteo_terabyte"
    ):
        prepare(dataset(tmp_path / "2", raw, format="criteo_terabyte", **later))
    with pytest.raises(DataError, match="nowhere is not a prepared data set"):
        prepare(dataset(tmp_path / "2", raw, vocabulary_from=str(tmp_path / "nowhere")))
    write(Path(first.prepared_dir) / "vocabulary" / "C7.parquet", b"junk")
    with pytest.raises(DataError, match=r"vocabulary/C7.parquet is damaged"):
        prepare(dataset(tmp_path / "2", raw, **later))
    assert names(tmp_path / "2") == []


@pytest.mark.parametrize(
    "lines, test_fraction, message",
    [
        ([b"0" + b"\t" * 39 + b"\n"] * 10, 0.2, "all 8 training rows have label 0: nothing to learn"),
        (
            [b"1" + b"\t" * 39 + b"\n"] * 8 + [b"0" + b"\t" * 39 + b"\n"] * 2,
            0.2,
            "all 8 training rows have label 1",
        ),
        (make_lines(1), 0.9, "no training rows: 1 good lines with test_fraction=0.9"),
        (make_lines(2), 0.2, "no test rows: 2 good lines with test_fraction=0.2; set it to 0"),
    ],
)
def test_parts_that_cannot_be_used_are_refused(tmp_path, lines, test_fraction, message):
    raw = write(tmp_path / "raw.tsv", lines)
    with pytest.raises(DataError, match=message):
        prepare(dataset(tmp_path, raw, test_fraction=test_fraction))
    assert names(tmp_path) == ["raw.tsv"]


def test_skipping_every_line_leaves_no_training_rows(tmp_path):
    raw = write(tmp_path / "raw.tsv", b"a\nb\n")
    with pytest.raises(DataError, match="no training rows: 0 good lines"):
        prepare(dataset(tmp_path, raw, on_bad_line="skip", test_fraction=0))


@pytest.mark.parametrize(
    "num_rows, fraction, test_rows",
    [
        (10, 0.2, 2),
        (10, 0.9, 9),
        (137_139, 0.2, 27_428),
        (7, 0.3, 2),
        (10, 0.0, 0),
        (45_840_617, 0.1, 4_584_062),
    ],
)
def test_the_test_part_is_the_rounded_fraction(num_rows, fraction, test_rows):
    assert split_by_time(num_rows, fraction) == {"train": num_rows - test_rows, "test": test_rows}


STEPS = ("stage", "fit", "write_splits", "describe", "readme")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_step_leaves_nothing_and_keeps_the_old(tmp_path, monkeypatch, step, error):
    config = dataset(tmp_path, write(tmp_path / "raw.tsv", make_lines(30)))
    original = getattr(prepare_module, step)

    def fail_after(*arguments: object) -> None:
        original(*arguments)
        raise error("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, step, fail_after)
        with pytest.raises(error):
            prepare(config)
    assert names(tmp_path) == ["raw.tsv"]

    manifest = prepare(config)
    monkeypatch.setattr(prepare_module, step, fail_after)
    with pytest.raises(error):
        prepare(config.model_copy(update={"overwrite": True, "min_count": 3}))
    assert names(tmp_path) == ["prepared", "raw.tsv"]
    assert Manifest.load(config.prepared_dir) == manifest
    manifest.verify(config.prepared_dir)


def test_an_existing_folder_is_refused_unless_overwritten(tmp_path):
    config = dataset(tmp_path, write(tmp_path / "raw.tsv", make_lines(30)))
    prepare(config)
    with pytest.raises(DataError, match="prepared already exists"):
        prepare(config)
    (Path(config.prepared_dir) / "train" / "stale.parquet").write_bytes(b"old")
    manifest = prepare(config.model_copy(update={"overwrite": True, "min_count": 3}))
    assert Manifest.load(config.prepared_dir) == manifest
    assert manifest.vocabulary.min_count == 3
    assert names(Path(config.prepared_dir) / "train") == ["part-00000.parquet"]
    assert names(tmp_path) == ["prepared", "raw.tsv"]


def test_the_manifest_says_how_it_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["recsys-basis", "prepare", "dataset=a b"])
    raw = write(tmp_path / "raw.tsv", make_lines(30))
    config = dataset(tmp_path, raw)
    manifest = prepare(config)
    assert Manifest.load(config.prepared_dir) == manifest
    saved = json.loads((Path(config.prepared_dir) / "manifest.json").read_text())
    assert saved["format_version"] == 1
    assert saved["columns"] == {"label": "int8"} | dict.fromkeys(DENSE_COLUMNS, "float32") | dict.fromkeys(
        SPARSE_COLUMNS, "int32"
    )
    (source,) = saved["sources"]
    assert source["path"] == str(raw)
    assert (source["num_lines"], source["num_bytes"]) == (30, raw.stat().st_size)
    assert source["sha256"] == hashlib.sha256(raw.read_bytes()).hexdigest()
    assert DatasetConfig(**saved["config"] | {"raw_paths": tuple(saved["config"]["raw_paths"])}) == config
    assert saved["command"] == "recsys-basis prepare 'dataset=a b'"
    assert {"python", "recsys_basis", "pyarrow", "duckdb", "pandas", "numpy"} == set(saved["versions"])
    assert "round(rows * 0.2)" in saved["split_rule"]

    recorded = {file.path: file for file in manifest.files()}
    written = {
        path.relative_to(config.prepared_dir).as_posix()
        for path in Path(config.prepared_dir).rglob("*.parquet")
    }
    assert recorded.keys() == written
    for path, file in recorded.items():
        data = (Path(config.prepared_dir) / path).read_bytes()
        assert file.sha256 == hashlib.sha256(data).hexdigest()
        assert file.num_rows == pq.read_metadata(Path(config.prepared_dir) / path).num_rows
    text = (Path(config.prepared_dir) / "README.md").read_text()
    assert "24 rows in time order" in text and str(raw) in text and "fewer than 2 times" in text


def test_the_same_config_gives_the_same_files(tmp_path):
    raw = write(tmp_path / "raw.tsv", make_lines(200))
    first = prepare(dataset(tmp_path / "1", raw))
    second = prepare(dataset(tmp_path / "2", raw))
    assert first.files() == second.files()


def test_lines_left_out_or_padded_are_logged(tmp_path, caplog):
    lines = [*make_lines(30), b"1\tx\n", b"2" + b"\t" * 39 + b"\n"]
    config = dataset(tmp_path / "1", write(tmp_path / "raw.tsv", lines), on_bad_line="skip")
    with caplog.at_level(logging.WARNING):
        prepare(config)
    messages = [record.getMessage() for record in caplog.records]
    assert any(
        "skipped 1 lines: wrong_column_count; the first: " in text and "line 31" in text for text in messages
    )
    assert any("skipped 1 lines: bad_label; the first: " in text and "line 32" in text for text in messages)
    caplog.clear()
    padded = write(tmp_path / "short.tsv", [*make_lines(30), b"1\t5\n"])
    with caplog.at_level(logging.WARNING):
        prepare(dataset(tmp_path / "2", padded, on_bad_line="pad"))
    assert [record.getMessage() for record in caplog.records] == ["padded 1 short lines with empty columns"]


def test_ensure_prepared_prepares_once_and_then_checks(tmp_path):
    raw = write(tmp_path / "raw.tsv", make_lines(30))
    config = dataset(tmp_path, raw)
    manifest = ensure_prepared(config)
    assert ensure_prepared(config) == manifest

    # Touched or moved, but the same content.
    raw.touch()
    assert ensure_prepared(config) == manifest
    moved = raw.rename(tmp_path / "moved.tsv")
    config = dataset(tmp_path, moved)
    assert ensure_prepared(config) == manifest

    for key, value in {
        "format": "criteo_terabyte",
        "min_count": 3,
        "test_fraction": 0.3,
        "on_bad_line": "skip",
        "row_group_rows": 10,
    }.items():
        with pytest.raises(
            DataError, match=f"prepared was prepared otherwise: {key} was .*, the config says {value}"
        ):
            ensure_prepared(config.model_copy(update={key: value}))
    two = config.model_copy(update={"raw_paths": (*config.raw_paths, str(raw))})
    with pytest.raises(DataError, match="raw_paths had 1 files, the config names 2"):
        ensure_prepared(two)

    data = moved.read_bytes()
    for changed in (data[:-3] + b"f" + data[-2:], data + data[-80:]):
        moved.write_bytes(changed)
        with pytest.raises(
            DataError, match=r"raw_paths: .*moved\.tsv is not the .*raw\.tsv that it was made from"
        ):
            ensure_prepared(config)
    again = ensure_prepared(config.model_copy(update={"overwrite": True, "on_bad_line": "skip"}))
    assert again.sources[0].num_bytes == len(data) + 80


def test_ensure_prepared_reads_raw_files_again_only_if_they_were_touched(tmp_path, monkeypatch):
    raw = write(tmp_path / "raw.tsv", make_lines(30))
    manifest = ensure_prepared(dataset(tmp_path, raw))
    read_again: list[Path] = []
    monkeypatch.setattr(prepare_module, "sha256_of", lambda path: read_again.append(path) or "another")
    assert ensure_prepared(dataset(tmp_path, raw)) == manifest
    assert read_again == []
    os.utime(raw, ns=(0, 0))
    with pytest.raises(DataError, match="raw_paths"):
        ensure_prepared(dataset(tmp_path, raw))
    assert read_again == [raw]


def test_ensure_prepared_compares_the_vocabulary(tmp_path):
    raw = write(tmp_path / "raw.tsv", make_lines(30))
    first = dataset(tmp_path / "1", raw)
    other = dataset(tmp_path / "2", write(tmp_path / "other.tsv", make_lines(50, seed=3)))
    ensure_prepared(first)
    ensure_prepared(other)
    later = dataset(tmp_path / "3", raw, vocabulary_from=first.prepared_dir)
    ensure_prepared(later)
    for wanted in (None, other.prepared_dir):
        with pytest.raises(DataError, match=f"not that of vocabulary_from={wanted}"):
            ensure_prepared(later.model_copy(update={"vocabulary_from": wanted}))
    with pytest.raises(DataError, match="not that of vocabulary_from="):
        ensure_prepared(first.model_copy(update={"vocabulary_from": other.prepared_dir}))


def test_folders_with_odd_names(tmp_path):
    folder = tmp_path / "we[i]rd * ? 'name'"
    folder.mkdir()
    config = dataset(folder, write(folder / "raw.tsv", make_lines(30)))
    assert prepare(config).splits["train"].num_rows == 24
    assert names(folder) == ["prepared", "raw.tsv"]
