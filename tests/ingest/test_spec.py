from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from recsys_basis.config_folder import config_folder
from recsys_basis.ingest.spec import DatasetConfig, SyntheticConfig
from recsys_basis.schema import ConfigError, parse_section


def read(name: str, **overrides: object) -> dict[str, object]:
    config = OmegaConf.merge(OmegaConf.load(config_folder() / name), overrides)
    return OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize(
    "name, data_format, min_count",
    [
        ("kaggle_137k", "criteo_kaggle", 2),
        ("criteo_kaggle", "criteo_kaggle", 10),
        ("criteo_terabyte", "criteo_terabyte", 10),
        ("synthetic", "criteo_kaggle", 2),
    ],
)
def test_every_dataset_file_is_a_whole_section(name, data_format, min_count):
    dataset = parse_section(DatasetConfig, read(f"dataset/{name}.yaml", raw_paths=["a.tsv", "b.tsv.gz"]))
    assert (dataset.format, dataset.min_count) == (data_format, min_count)
    assert (dataset.test_fraction, dataset.on_bad_line, dataset.overwrite) == (0.2, "error", False)
    assert dataset.row_group_rows == 65536
    assert dataset.raw_paths == ("a.tsv", "b.tsv.gz")


def test_the_real_sample_is_found_through_the_environment(monkeypatch):
    monkeypatch.setenv("RECSYS_BASIS_DATA", "/some/where")
    dataset = parse_section(DatasetConfig, read("dataset/kaggle_137k.yaml"))
    assert dataset.raw_paths == ("/some/where/criteo/kaggle_137k.tsv.gz",)
    monkeypatch.delenv("RECSYS_BASIS_DATA")
    dataset = parse_section(DatasetConfig, read("dataset/kaggle_137k.yaml"))
    assert dataset.raw_paths == ("../shared/data/criteo/kaggle_137k.tsv.gz",)


def test_the_synthetic_data_set_reads_what_the_teacher_writes():
    synthetic = parse_section(SyntheticConfig, read("synthetic/default.yaml"))
    assert parse_section(DatasetConfig, read("dataset/synthetic.yaml")).raw_paths == (synthetic.path,)


GOOD = {
    "format": "criteo_kaggle",
    "raw_paths": "a.tsv",
    "prepared_dir": "data/a",
    "vocabulary_from": None,
    "min_count": 1,
    "test_fraction": 0,
    "on_bad_line": "error",
    "overwrite": False,
    "row_group_rows": 1,
}


def test_one_path_may_stand_alone():
    assert parse_section(DatasetConfig, GOOD).raw_paths == ("a.tsv",)


@pytest.mark.parametrize(
    "key, value",
    [
        ("format", "avazu"),
        ("raw_paths", []),
        ("raw_paths", 3),
        ("raw_paths", [3]),
        ("raw_paths", ["a", "b", "a"]),
        ("raw_paths", ""),
        ("prepared_dir", ""),
        ("min_count", 0),
        ("min_count", 2.5),
        ("min_count", "2"),
        ("test_fraction", 1.0),
        ("test_fraction", -0.1),
        ("on_bad_line", "ignore"),
        ("overwrite", "yes"),
        ("row_group_rows", 0),
        ("shuffle", True),
    ],
)
def test_a_bad_value_is_refused_by_key(key, value):
    with pytest.raises(ConfigError, match=key):
        parse_section(DatasetConfig, GOOD | {key: value}, "dataset")
