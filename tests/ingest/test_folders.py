from __future__ import annotations

from pathlib import Path

import pytest

from recsys_basis.ingest.errors import DataError
from recsys_basis.ingest.folders import scratch_folder, whole_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make(target: Path, content: str, overwrite: bool = False) -> None:
    with whole_folder(target, overwrite, marker="mark") as folder:
        (folder / "mark").write_text(content)


def test_the_folder_appears_when_the_block_is_done(tmp_path):
    target = tmp_path / "a" / "b"
    with whole_folder(target, False, "mark") as folder:
        (folder / "file").write_text("x")
        assert not target.exists()
    assert names(target) == ["file"]
    assert names(tmp_path / "a") == ["b"]
    assert target.stat().st_mode & 0o777 == (tmp_path / "a").stat().st_mode & 0o777


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_stays_after_a_failure(tmp_path, error):
    with pytest.raises(error), whole_folder(tmp_path / "b", False, "mark") as folder:
        (folder / "file").write_text("x")
        raise error
    assert names(tmp_path) == []


def test_an_existing_folder_is_refused(tmp_path):
    make(tmp_path / "b", "old")
    with pytest.raises(DataError, match=r"/b already exists: name another folder, or set overwrite=true"):
        make(tmp_path / "b", "new")
    assert (tmp_path / "b" / "mark").read_text() == "old"


def test_overwrite_replaces_only_when_the_new_one_is_done(tmp_path):
    target = tmp_path / "b"
    make(target, "old")
    with pytest.raises(ValueError), whole_folder(target, True, "mark") as folder:
        (folder / "mark").write_text("half")
        raise ValueError
    assert (target / "mark").read_text() == "old"
    make(target, "new", overwrite=True)
    assert (target / "mark").read_text() == "new"
    assert names(tmp_path) == ["b"]


def test_the_old_folder_comes_back_when_the_new_one_cannot_be_placed(tmp_path, monkeypatch):
    target = tmp_path / "b"
    make(target, "old")
    rename = Path.rename

    def fail_for_new(path: Path, to: Path) -> Path:
        if path.name == "new":
            raise OSError("no")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(OSError, match="no"):
        make(target, "new", overwrite=True)
    assert (target / "mark").read_text() == "old"
    assert names(tmp_path) == ["b"]


def test_overwrite_spares_a_folder_that_is_not_ours(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("dear")
    with pytest.raises(DataError, match="holds no mark, so it is not replaced"):
        make(tmp_path / "home", "new", overwrite=True)
    assert names(tmp_path / "home") == ["letters"]


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    make(tmp_path / "disk", "old")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    make(tmp_path / "link", "new", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "mark").read_text() == "new"


def test_a_scratch_folder_is_gone_afterwards(tmp_path):
    with pytest.raises(ValueError), scratch_folder(tmp_path / "b") as folder:
        assert folder.parent == tmp_path
        (folder / "file").write_text("x")
        raise ValueError
    assert names(tmp_path) == []


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="file cannot be written to"), scratch_folder(tmp_path / "file" / "b"):
        pass
