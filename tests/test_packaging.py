"""What is installed: the wheel holds all that it needs, and all files that name a version name the same."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.kernels import require_kernels

import recsys_basis
from recsys_basis import doctor

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(*extras: str) -> list[Requirement]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def read_lock(name: str) -> dict[str, Version]:
    """Package name to version; fails on a line that is not ``name==version``."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [re.fullmatch(r"([a-z0-9-]+)==([^\s*]+)", line) for line in lines if not line.startswith("#")]
    assert all(pins), [line for line, pin in zip(lines[1:], pins, strict=True) if not pin]
    return {pin[1]: Version(pin[2]) for pin in pins if pin}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build as pip does, with this environment's build tools; returns the unpacked wheel."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--wheel-dir", str(folder), str(ROOT)],
        env=os.environ | environment,
        check=True,
        cwd=folder,
    )
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def run_installed(wheel: Path, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in ``folder`` with the wheel's package; -S keeps an editable install out of the way."""
    code = f"import sys; sys.path[:] = {[str(wheel), *sys.path]!r}\n{code}"
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def files_below(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_wheel_holds_the_package_and_its_configs_and_nothing_else(wheel: Path) -> None:
    inside = files_below(wheel / "recsys_basis")
    configs = {f"configs/{name}": text for name, text in files_below(ROOT / "configs").items()}
    assert "configs/train.yaml" in configs
    compiled = {name for name in inside if name.endswith(".so")}
    expected = files_below(ROOT / "recsys_basis") | configs
    assert {name: text for name, text in inside.items() if name not in compiled} == expected
    require_kernels()  # where they were compiled once, they must be here
    (name,) = compiled
    assert name.startswith("kernels/_kernels.")
    assert [path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")] == ["recsys_basis"]


def test_an_installed_package_finds_its_own_configs(wheel: Path, tmp_path: Path) -> None:
    code = "from recsys_basis.config_folder import config_folder; print(config_folder())"
    done = run_installed(wheel, code, tmp_path)
    assert Path(done.stdout.strip()) == wheel / "recsys_basis" / "configs"


def test_without_a_compiler_the_package_installs_and_says_what_it_lacks(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CXX="/nonexistent/c++")
    code = (
        "from recsys_basis.embeddings.choice import choose_bags_kernel, describe_choice\n"
        "from recsys_basis.row_optimizers import row_optimizer_defaults\n"
        "basis = row_optimizer_defaults('basis')\n"
        "print(choose_bags_kernel('auto', basis, 'cpu'), describe_choice(basis, 'cpu'))\n"
        "choose_bags_kernel('cpp', basis, 'cpu')"
    )
    done = run_installed(wheel, code, tmp_path)
    assert done.stdout.startswith("torch embedding.kernel = auto: plain PyTorch, since the compiled kernels")
    assert "embedding.kernel = cpp: the compiled kernels do not load" in done.stderr
    assert "install a C++17 compiler" in done.stderr


def test_the_wheel_declares_the_command_the_version_and_the_license(wheel: Path) -> None:
    (info,) = wheel.glob("*.dist-info")
    entry_points = configparser.ConfigParser()
    entry_points.read(info / "entry_points.txt")
    assert entry_points["console_scripts"]["recsys-basis"] == "recsys_basis.cli:main"
    metadata = importlib.metadata.Distribution.at(info).metadata
    assert metadata["Version"] == recsys_basis.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (info / "licenses" / "LICENSE").read_text()


def test_doctor_wants_what_pyproject_says(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(wheel)
    assert doctor.wanted_versions() == {r.name: r.specifier for r in requirements("cuda")}


@pytest.mark.parametrize("name", ["torch", "torchrec", "torchmetrics", "fbgemm-gpu"])
def test_what_must_fit_together_is_pinned_and_locked_to_the_pin(name: str) -> None:
    (pin,) = (requirement for requirement in requirements("cuda") if requirement.name == name)
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    cpu_name = "fbgemm-gpu-cpu" if name == "fbgemm-gpu" else name
    assert read_lock("cpu.lock")[cpu_name].public == specifier.version
    assert read_lock("cuda.lock")[name].public == specifier.version


def test_the_cpu_lock_takes_torch_and_fbgemm_without_cuda() -> None:
    lock = read_lock("cpu.lock")
    assert lock["torch"].local == "cpu"
    assert not [
        name for name in lock if name.startswith(("nvidia-", "cuda-", "triton")) or name == "fbgemm-gpu"
    ]


def test_the_locks_satisfy_pyproject_and_each_other() -> None:
    cpu, cuda, dev = (read_lock(name) for name in ("cpu.lock", "cuda.lock", "dev.lock"))
    assert all(r.specifier.contains(cpu[r.name]) for r in requirements())
    assert all(r.specifier.contains(cuda[r.name]) for r in requirements("cuda"))
    assert all(r.specifier.contains((cpu | dev)[r.name]) for r in requirements("dev"))
    assert {name: version for name, version in cpu.items() if name in cuda and name != "torch"} == {
        name: version for name, version in cuda.items() if name in cpu and name != "torch"
    }
    assert set(cpu) - set(cuda) == {"fbgemm-gpu-cpu"}
    assert not set(dev) & set(cuda)


@pytest.mark.parametrize("name", ["cpu.lock", "dev.lock"])
def test_the_lock_names_all_that_its_packages_need(name: str) -> None:
    available = read_lock("cpu.lock") | read_lock("dev.lock")
    for package in read_lock(name):
        for line in importlib.metadata.requires(package) or []:
            need = Requirement(line)
            applies = need.marker is None or need.marker.evaluate({"extra": ""})
            # The CPU build of fbgemm goes by another name than torchrec asks for.
            if applies and need.name != "fbgemm-gpu":
                assert need.specifier.contains(available[canonicalize_name(need.name)], prereleases=True), (
                    line
                )


def test_every_import_of_the_package_is_a_declared_dependency() -> None:
    owners = importlib.metadata.packages_distributions()
    declared = {canonicalize_name(requirement.name) for requirement in requirements("cuda")}
    for path in (ROOT / "recsys_basis").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for module in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"recsys_basis"}:
                found = {canonicalize_name(owner).removesuffix("-cpu") for owner in owners.get(module, [])}
                assert found & declared, f"{path}: {module} is not among pyproject.toml's dependencies"


def test_the_cpu_index_of_torch_is_the_same_everywhere() -> None:
    makefile = (ROOT / "Makefile").read_text()
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"TORCH_INDEX ?= {doctor.TORCH_CPU_INDEX}\n" in makefile
    assert f"ARG TORCH_INDEX={doctor.TORCH_CPU_INDEX}\n" in dockerfile
