"""`recsys-basis inspect`: numbers of a checkpoint as its tensors have them; damage is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.trained import save_checkpoint, trained

from recsys_basis.checkpoints.index import read_tensors
from recsys_basis.cli import main


@pytest.fixture(scope="module")
def run(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with trained(prepared, "row_optimizer=adam") as trainable:
        for step in (3, 5):
            save_checkpoint(folder / "checkpoints", trainable, step)
    return folder


def cells(text: str, first: str) -> list[str]:
    """The cells of the row of a table that begins with ``first``."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {first} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_checkpoint_is_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / "step-000000005"
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "step 5, epoch 0, 5 batches" in text and "checksums of 2 files: valid" in text
    tensors = read_tensors(path)
    weight = next(value for key, value in tensors.items() if key.endswith(".C3.weight"))
    name, _, rows, partitions, dtype, *_ = cells(text, "C3")
    assert (name, rows, dtype) == ("C3", f"{len(weight)} x 8", "float32") and int(partitions) > 1
    moments = [value for key, value in tensors.items() if key.endswith(".second_moment")]
    assert all(value.dtype == torch.float32 for value in moments)
    (line,) = [line for line in text.splitlines() if line.startswith("│ row_optimizer ") and "second" in line]
    assert f"{sum(value.nbytes for value in moments):,}" in line and "float32" in line
    assert cells(text, "row_optimizer.rule")[1] == "adam"


def test_a_run_lists_its_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run)]) == 0
    text = capsys.readouterr().out
    assert "has not ended" in text
    assert cells(text, "step-000000003")[1:] == ["3", "0", "3", "none", "whole"]
    assert cells(text, "step-000000005")[-1] == "whole"


def test_damage_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, tmp_path / "run")
    shard = tmp_path / "run" / "checkpoints" / "step-000000003" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["inspect", str(shard.parent)]) == 1
    captured = capsys.readouterr()
    assert "DAMAGED" in captured.out and f"{shard} is damaged" in captured.err
    assert main(["inspect", str(tmp_path / "run")]) == 1
    captured = capsys.readouterr()
    assert cells(captured.out, "step-000000003")[-1] == "damaged" and f"{shard} is damaged" in captured.err
    assert cells(captured.out, "step-000000005")[-1] == "whole"


def test_what_is_no_checkpoint_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    assert f"{tmp_path} is neither a checkpoint" in capsys.readouterr().err
    assert main(["inspect"]) == 2
    assert main(["inspect", "--help"]) == 0
    assert "usage: recsys-basis inspect PATH" in capsys.readouterr().out
