"""What the command line answers, without starting any work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recsys_basis.cli import JOBS, main, run_job
from recsys_basis.errors import UserError


def test_help_lists_every_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(job in text for job in JOBS)
    assert main([]) == 0


@pytest.mark.parametrize("job", ["synthesize", "prepare", "train", "compare", "plan"])
def test_help_of_a_job_shows_its_keys_with_their_comments(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([job, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"recsys-basis {job}" in text  # an example to copy
    assert ("memory_gb" if job == "plan" else "output_dir") in text and "#" in text
    if job in ("train", "compare", "plan"):
        assert "rows_per_bucket: 1000.0" in text  # the keys of the default options, too
        assert "partial_rowwise_adam" in text  # and which other options there are


def test_unknown_job_exits_2_and_names_the_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trane"]) == 2
    assert "trane" in (text := capsys.readouterr().err) and "compare" in text


def test_user_errors_print_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(overrides: list[str]) -> None:
        raise UserError("the reason and the fix")

    assert run_job("train", fail, []) == 1
    assert capsys.readouterr().err == "recsys-basis train: the reason and the fix\n"


def test_other_errors_keep_their_traceback() -> None:
    def fail(overrides: list[str]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_job("train", fail, [])


def test_interrupt_exits_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(overrides: list[str]) -> None:
        raise KeyboardInterrupt

    assert run_job("train", interrupt, []) == 130


def test_help_imports_neither_torch_nor_torchrec() -> None:
    code = "import sys; from recsys_basis.cli import main; main(['train', '--help']); "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'torchrec')))"
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
    )


def test_each_job_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "recsys_basis.train", "no_such_key=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "no_such_key" in result.stderr and "Traceback" not in result.stderr
