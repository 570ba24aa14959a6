from __future__ import annotations

import json
from pathlib import Path

import pytest

from recsys_basis.ingest.errors import DataError
from recsys_basis.ingest.manifest import Manifest, sha256_of
from recsys_basis.prepare import prepare


@pytest.fixture
def prepared(config, raw_line) -> Path:
    lines = [raw_line(label=b"%d" % (number % 2)) for number in range(20)]
    Path(config.raw_paths[0]).write_bytes(b"".join(lines))
    prepare(config)
    return Path(config.prepared_dir)


def test_a_whole_folder_verifies(prepared):
    manifest = Manifest.load(prepared)
    manifest.verify(prepared)
    assert len(manifest.files()) == 28
    assert Manifest.load(str(prepared)) == manifest


@pytest.mark.parametrize(
    "name", ["train/part-00000.parquet", "test/part-00000.parquet", "vocabulary/C26.parquet"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_names_the_file_that_is_damaged(prepared, name, damage):
    path = prepared / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[:-1] if damage == "cut" else data)
    if damage == "remove":
        path.unlink()
    word = "is missing" if damage == "remove" else "is damaged"
    with pytest.raises(DataError, match=f"{name} {word}"):
        Manifest.load(prepared).verify(prepared)


def test_a_folder_without_manifest_is_not_prepared(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match=r"is not a prepared data set \(it has no manifest.json\)"):
            Manifest.load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 1}', "\udcff"])
def test_a_manifest_that_is_no_manifest(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        Manifest.load(tmp_path)


def change(prepared: Path, key: str, value: object) -> None:
    path = prepared / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_another_version_is_named(prepared, version):
    change(prepared, "format_version", version)
    with pytest.raises(
        DataError, match=rf"manifest.json has format version {version!r}, this program reads 1"
    ):
        Manifest.load(prepared)


@pytest.mark.parametrize(
    "key, value", [("cardinalities", {"C1": "many"}), ("integer_shifts", 3), ("extra", 1)]
)
def test_a_wrong_key_is_named(prepared, key, value):
    change(prepared, key, value)
    with pytest.raises(DataError, match=f"manifest.json is damaged: {key}"):
        Manifest.load(prepared)


def test_sha256_of_known_bytes(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_of(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
