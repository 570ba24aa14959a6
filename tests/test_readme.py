"""The README's commands run as they stand, one after the other, on data made small."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recsys_basis.config import compose_job
from recsys_basis.ingest.spec import SyntheticConfig
from recsys_basis.ingest.synthetic import synthesize
from recsys_basis.schema import parse_section

REPOSITORY = Path(__file__).resolve().parents[1]
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    for line in block.splitlines()
]
SMALL_CLICKS = ["rows=4000", "cardinality_scale=0.001"]
SMALL_MODEL = ["model.dense_arch=[16,16]", "model.over_arch=[16,1]"]
FEW_RUNS = ["comparison.seeds=[0]", "comparison.search.seeds=[0]", "comparison.search.extensions=0"]

TWO_VARIANTS = (
    "comparison.variants=[{name: adam, overrides: ['row_optimizer=adam'], learning_rates: [0.004]}, "
    "{name: basis, overrides: ['row_optimizer=basis'], learning_rates: [0.004]}]"
)


def smaller(command: list[str]) -> list[str]:
    """Overrides that make ``command`` fast without changing what it does."""
    if "synthesize" in command:
        return [f"synthetic.{setting}" for setting in SMALL_CLICKS]
    if "compare" in command:
        (comparison,) = [part for part in command if part.startswith("comparison=")]
        writes = "demo" in comparison or "synthetic" in comparison
        clicks = [f"comparison.synthetic.{setting}" for setting in SMALL_CLICKS]
        whole_shelf = "shelf" in comparison or "claim" in comparison
        return FEW_RUNS + SMALL_MODEL + (clicks if writes else []) + ([TWO_VARIANTS] if whole_shelf else [])
    return SMALL_MODEL if "train" in command or "recsys_basis.train" in command else []


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stand-ins for the real logs: synthetic lines in the same format."""
    place = tmp_path_factory.mktemp("readme")
    raw = place / "real" / "criteo" / "kaggle_137k.tsv.gz"
    overrides = [f"synthetic.{setting}" for setting in SMALL_CLICKS] + [f"synthetic.path={raw}"]
    synthesize(parse_section(SyntheticConfig, compose_job("synthesize", overrides)["synthetic"]))
    (place / "train.txt").write_bytes(gzip.decompress(raw.read_bytes()))
    return place


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    """CI runs them (.ci/run); running `make test` from a test would never end."""
    target = shlex.split(line)[1]
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert f"make {target}" in (REPOSITORY / ".ci" / "run").read_text()


@pytest.mark.parametrize("line", [line for line in COMMANDS if not line.startswith("make ")])
def test_commands_run(line: str, place: Path) -> None:
    command = shlex.split(line)
    program = Path(sys.executable).parent / command[0]
    environment = os.environ | {"RECSYS_BASIS_DATA": str(place / "real"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [str(program), *command[1:], *smaller(command)],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    allowed = (0, 1) if command[1] == "doctor" else (0,)  # doctor may find fault with this machine
    assert result.returncode in allowed, result.stdout + result.stderr
    assert "Warning" not in result.stderr, result.stderr


def test_the_program_in_the_shelfs_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "docs" / "row_optimizers.md").read_text(), re.DOTALL
    )
    exec(program, {})
    # 4 bytes for each of 100,032 + 20,000 rows, 4 * 16 + 4 for each bucket row, 8 for each table.
    rows, buckets = 100_032 + 20_000, 64 * (1563 // 1000) + 16 * (1250 // 1000)
    assert capsys.readouterr().out == f"{4 * rows + 68 * buckets + 16} bytes of optimizer state\n"
