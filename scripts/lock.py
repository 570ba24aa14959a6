"""Write requirements/*.lock anew: every package that pyproject.toml leads to, each at one exact version.

    .venv/bin/python scripts/lock.py

Each lock is complete, to be installed with ``pip install --no-deps -r``:

    cpu.lock   for a machine without a GPU: PyTorch's own CPU build, and fbgemm-gpu-cpu in the place of
               fbgemm-gpu, which torchrec's metadata asks for
    cuda.lock  the same versions with the CUDA builds and NVIDIA's libraries
    dev.lock   what tests, lint and the editable install add to either

pip resolves but installs nothing. The newest versions that pyproject.toml allows win. The locks are made for
CPython 3.11 on Linux x86-64; run it there, with PyTorch's CPU wheels (https://download.pytorch.org/whl/cpu)
in reach of pip's configuration.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
HEADER = "# Made by scripts/lock.py from pyproject.toml; install with --no-deps.\n"


def resolve(*requirements: str, constraints: Sequence[str] = ()) -> dict[str, str]:
    """Package name to version for all that ``requirements`` lead to, but this project itself."""
    with tempfile.TemporaryDirectory() as folder:
        constraint_file = Path(folder, "constraints.txt")
        constraint_file.write_text("\n".join(constraints))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", f"{folder}/report.json", "--constraint", str(constraint_file), *requirements]
        subprocess.run(command, check=True, cwd=ROOT)
        report = json.loads(Path(folder, "report.json").read_text())
    found = [item["metadata"] for item in report["install"]]
    versions = {canonicalize_name(item["name"]): item["version"] for item in found}
    return {name: version for name, version in versions.items() if name != "recsys-basis"}


def pins(versions: dict[str, str]) -> list[str]:
    """``name==version`` lines in the order of names."""
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def write(name: str, versions: dict[str, str]) -> None:
    """Write ``requirements/<name>``."""
    (LOCKS / name).write_text(HEADER + "".join(f"{line}\n" for line in pins(versions)))
    print(f"{LOCKS / name}: {len(versions)} packages")


def main() -> None:
    """Resolve the three sets one after another, so that they agree where they overlap."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(line for line in project["dependencies"] if line.startswith("torch=="))
    cpu = resolve(f"{torch}+cpu", ".[cuda]")
    fbgemm = cpu.pop("fbgemm-gpu")
    shared = pins({name: version for name, version in cpu.items() if name != "torch"})
    # "===" keeps the +cpu build out, which "==" would accept and prefer.
    cuda = resolve(torch.replace("==", "==="), ".[cuda]", constraints=shared)
    dev = resolve(f"{torch}+cpu", ".[cuda,dev]", constraints=shared)
    write("cpu.lock", cpu | {"fbgemm-gpu-cpu": fbgemm})
    write("cuda.lock", cuda)
    write(
        "dev.lock", {name: version for name, version in dev.items() if name not in cuda and name not in cpu}
    )


if __name__ == "__main__":
    main()
