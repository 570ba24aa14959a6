"""Files appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsys_basis.atomic import written_whole


def test_appears_at_the_end_of_the_block(tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    with written_whole(target) as path:
        path.write_text("new")
        assert not target.exists()
        assert path.suffix == target.suffix
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("old", [None, "old"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, old: str | None) -> None:
    target = tmp_path / "table.csv"
    if old:
        target.write_text(old)
    with pytest.raises(RuntimeError, match="full disk"), written_whole(target) as path:
        path.write_text("half of the ne")
        raise RuntimeError("full disk")
    assert [file.read_text() for file in tmp_path.iterdir()] == ([old] if old else [])
