"""``recsys-basis JOB [key=value ...]``: one command, one module a job."""

from __future__ import annotations

import ast
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from recsys_basis.config import describe_job
from recsys_basis.errors import UserError

JOBS = {
    "synthesize": "write a Criteo-format click log from a teacher whose AUC is known",
    "prepare": "raw Criteo logs to Parquet, vocabulary and manifest",
    "plan": "what tables and optimizer state cost, and where they go, on ranks that are not there",
    "train": "train one model; under torchrun, on several ranks",
    "compare": "train variants with several seeds and print AUC beside Adam's",
    "inspect": "list what a checkpoint or a run's folder holds, checksums verified",
    "doctor": "check this machine: versions, devices, threads, memory, disk",
}
WITHOUT_CONFIG = ("inspect", "doctor")
HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that the first argument names; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in HELP:
        print("usage: recsys-basis JOB [key=value ...]\n\njobs:")
        for name, purpose in JOBS.items():
            print(f"  {name:<11} {purpose}")
        print("\n`recsys-basis JOB --help` explains a job, its keys and their defaults.")
        return 0
    job, rest = arguments[0], arguments[1:]
    if job not in JOBS:
        print(f"recsys-basis: no job {job!r}; one of {', '.join(JOBS)}", file=sys.stderr)
        return 2
    if job not in WITHOUT_CONFIG and any(argument in HELP for argument in rest):
        return print_help(job)  # without the seconds that importing torch and TorchRec takes
    return int(importlib.import_module(f"recsys_basis.{job}").main(rest))


def print_help(job: str) -> int:
    """Print the job module's docstring, its commented config, and the options of its groups."""
    spec = find_spec(f"recsys_basis.{job}")
    assert spec is not None and spec.origin is not None
    purpose = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    print(f"{purpose}\n\nKeys, meanings and defaults:\n\n{describe_job(job)}")
    return 0


def run_job(job: str, work: Callable[[list[str]], object], arguments: Sequence[str] | None) -> int:
    """Answer --help, else call ``work(overrides)``; errors meant for the user print without a traceback."""
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    if any(argument in HELP for argument in overrides):
        return print_help(job)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("recsys_basis").setLevel(logging.INFO)
    try:
        work(overrides)
    except UserError as error:
        print(f"recsys-basis {job}: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # no permission, no room, a file where a folder should be: errno says it
        print(f"recsys-basis {job}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"recsys-basis {job}: interrupted", file=sys.stderr)
        return 130
    return 0
