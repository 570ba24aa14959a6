"""``recsys-basis doctor``: is all in place for the jobs, and what to do where it is not.

It prints a table each of packages, binaries and machine, with the fix under each warning and fault. torch,
fbgemm and torchrec may be missing or not fit each other, so they are imported in ``load`` and nowhere else.
The versions wanted are those in this package's own metadata, which come from pyproject.toml.
"""

from __future__ import annotations

import datetime
import importlib
import logging
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

USAGE = """usage: recsys-basis doctor [output_dir=PATH]

Checks versions, binaries, devices, threads, gloo and NCCL, free memory, and free disk where runs are written
(output_dir, default: runs). Exits with 1 if there is a fault; each comes with its fix."""

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FBGEMM_BUILDS = ("fbgemm-gpu", "fbgemm-gpu-cpu")  # for CUDA, without CUDA: two packages that fill one folder
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CPU_INFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")  # of the container, where there is one
GIB = 1024**3
MIN_MEMORY_BYTES = 2 * GIB  # torch, torchrec and the tables of the demo fit
MIN_DISK_BYTES = GIB  # the demo's data, runs and checkpoints fit
VERDICT_STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; a warning or a fault says how to mend it."""

    subject: str
    found: str
    wanted: str = ""
    verdict: Literal["ok", "warning", "fault"] = "ok"
    fix: str = ""


def main(arguments: Sequence[str]) -> int:
    """Print the report; returns 0 if nothing is at fault, 1 if something is, 2 for an unknown argument."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE)
        return 0
    output_dir = Path("runs")
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key != "output_dir" or not value:
            print(f"recsys-basis doctor: cannot read {argument!r}\n{USAGE}", file=sys.stderr)
            return 2
        output_dir = Path(value)
    num_faults = 0
    # A section prints before the next one starts: a library that brings Python down hides no earlier finding.
    sections = {
        "packages": check_packages(),
        "binaries": check_binaries(),
        "machine": check_machine(output_dir),
    }
    for title, checks in sections.items():
        findings = list(checks)
        print_section(title, findings)
        num_faults += sum(finding.verdict == "fault" for finding in findings)
    print(f"{num_faults} at fault: see FIX above" if num_faults else "nothing is at fault")
    return 1 if num_faults else 0


def print_section(title: str, findings: Sequence[Finding]) -> None:
    """A table of the findings, then one FIX line for each that has one."""
    console = Console(highlight=False)
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("", "found", "wanted", "verdict"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=VERDICT_STYLES[finding.verdict])
        table.add_row(Text(finding.subject), Text(finding.found), Text(finding.wanted), verdict)
    console.print(table)
    for finding in findings:
        if finding.fix:
            # One unbroken line, so that the command in it can be copied.
            console.print(Text(f"FIX {finding.subject}: {finding.fix}"), soft_wrap=True)


# Packages: what is installed against what the metadata wants.


def wanted_versions() -> dict[str, SpecifierSet]:
    """Package name to the versions this package's metadata wants; {} where the package is not installed."""
    try:
        lines = metadata.requires("recsys-basis") or []
    except metadata.PackageNotFoundError:
        return {}
    # The extra ``cuda`` names the version of fbgemm, which both of its builds share.
    requirements = [Requirement(line) for line in lines]
    return {
        requirement.name: requirement.specifier
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": "cuda"})
    }


def installed_version(name: str) -> str | None:
    """The version of package ``name``, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages() -> Iterator[Finding]:
    """Python, and each package that the metadata wants."""
    wanted = wanted_versions()
    if not wanted:
        fix = f"in the checkout, `make install`, or {_pip('install --no-deps --editable .')}"
        yield Finding("recsys-basis", "not installed", "installed", "fault", fix)
        return
    yield _check_python()
    for name, versions in wanted.items():
        yield _check_fbgemm_build(versions) if name in FBGEMM_BUILDS else _check_package(name, versions)


def _check_python() -> Finding:
    found = platform.python_version()
    wanted = metadata.metadata("recsys-basis")["Requires-Python"]
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Finding("python", found, wanted)
    return Finding("python", found, wanted, "fault", f"make the environment with Python {wanted}")


def _check_package(name: str, wanted: SpecifierSet) -> Finding:
    found = installed_version(name)
    if found is not None and wanted.contains(found, prereleases=True):
        return Finding(name, found, str(wanted))
    return Finding(name, found or "missing", str(wanted), "fault", _install_command(name))


def _check_fbgemm_build(wanted: SpecifierSet) -> Finding:
    found = {name: version for name in FBGEMM_BUILDS if (version := installed_version(name))}
    told = ", ".join(f"{name} {version}" for name, version in found.items()) or "missing"
    if len(found) > 1:
        fix = f"the CUDA and the CPU build overwrite each other's files: {_install_command('fbgemm-gpu')}"
        return Finding("fbgemm", told, f"one build, {wanted}", "fault", fix)
    if not found or not wanted.contains(next(iter(found.values())), prereleases=True):
        return Finding("fbgemm", told, str(wanted), "fault", _install_command("fbgemm-gpu"))
    if "fbgemm-gpu-cpu" in found:
        # torchrec's metadata knows the CUDA build's name only.
        told += " (`pip check` misses fbgemm-gpu: so it should)"
    return Finding("fbgemm", told, str(wanted))


def _pip(command: str) -> str:
    return f"`{sys.executable} -m pip {command}`"


def _install_command(name: str) -> str:
    """The pip command that puts the wanted version of ``name``, in the build for this machine, in place.

    torchrec goes in without its dependencies: they would draw in the CUDA build of fbgemm.
    """
    has_gpu = NVIDIA_DRIVER.exists()
    version = wanted_versions().get(name, SpecifierSet())
    if name == "torch" and not has_gpu:
        build = f"torch{version}+cpu" if version else "torch"
        return _pip(f"install --force-reinstall --no-deps --extra-index-url {TORCH_CPU_INDEX} {build}")
    if name == "torch":
        return _pip(f"install --force-reinstall torch{version}")
    if name in FBGEMM_BUILDS:
        build = "fbgemm-gpu" if has_gpu else "fbgemm-gpu-cpu"
        remove = _pip(f"uninstall --yes {' '.join(FBGEMM_BUILDS)}")
        return f"{remove}, then {_pip(f'install --no-deps {build}{version}')}"
    if name == "torchrec":
        return _pip(f"install --force-reinstall --no-deps {name}{version}")
    return _pip(f"install '{name}{version}'")


# Binaries: do the installed packages load, and do they fit each other.


def load(name: str) -> ModuleType | Exception:
    """Import module ``name``, or return what stopped it: the one place that a broken package reaches."""
    logging.disable(logging.CRITICAL)  # fbgemm also logs what it raises
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:
        return error
    finally:
        logging.disable(logging.NOTSET)


def check_binaries() -> Iterator[Finding]:
    """torch, fbgemm, torchrec and TensorBoard load; one operator of fbgemm runs."""
    torch = load("torch")
    if isinstance(torch, Exception):
        yield Finding("torch", _reason(torch), "loads", "fault", _explain_torch(torch))
        return
    yield Finding("torch", f"{torch.__version__} loads", "loads")
    fbgemm = _check_fbgemm(torch)
    yield fbgemm
    if fbgemm.verdict == "ok":  # else torchrec would only repeat that fault
        yield _check_torchrec()
    tensorboard = load("torch.utils.tensorboard")
    if isinstance(tensorboard, Exception):
        fix = _install_command("tensorboard")
        yield Finding("tensorboard", _reason(tensorboard), "loads", "fault", fix)
    else:
        yield Finding("tensorboard", "loads", "loads")


def _reason(error: BaseException) -> str:
    """The error that began it all, on one line that a mangled symbol name cannot fill a screen with."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _explain_torch(error: Exception) -> str:
    reason = _reason(error)
    if "libcu" in reason or "libnv" in reason:
        return f"this torch is the CUDA build without its CUDA libraries: {_install_command('torch')}"
    if isinstance(error, ModuleNotFoundError) and error.name not in (None, "torch"):
        return f"torch needs {error.name}: {_pip(f'install {error.name}')}"
    return _install_command("torch")


def _check_fbgemm(torch: ModuleType) -> Finding:
    """Load fbgemm and run one of its operators, which registers only if it was built for this torch."""
    fbgemm = load("fbgemm_gpu")
    wanted = "loads, operators run"
    if isinstance(fbgemm, Exception):
        return Finding("fbgemm", _reason(fbgemm), wanted, "fault", _explain_fbgemm(torch, _reason(fbgemm)))
    try:
        sums = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 2])).tolist()
    except Exception as error:
        return Finding("fbgemm", _reason(error), wanted, "fault", _explain_fbgemm(torch, _reason(error)))
    if sums != [0, 1, 3]:
        fix = _explain_fbgemm(torch, "")
        return Finding("fbgemm", f"its cumulative sum of 1, 2 is {sums}", wanted, "fault", fix)
    return Finding("fbgemm", wanted, wanted)


def _explain_fbgemm(torch: ModuleType, reason: str) -> str:
    mend = _install_command("fbgemm-gpu")
    if "libnvidia-ml" in reason:
        return f"this is fbgemm's CUDA build, which needs an NVIDIA driver, and here is none: {mend}"
    if "cuda" in reason and torch.version.cuda is None:
        return f"this is fbgemm's CUDA build beside a CPU build of torch: {mend}"
    return f"this fbgemm was built for another torch than {torch.__version__} (ABI mismatch): {mend}"


def _check_torchrec() -> Finding:
    torchrec = load("torchrec")
    if not isinstance(torchrec, Exception):
        return Finding("torchrec", "loads", "loads")
    if isinstance(torchrec, ModuleNotFoundError) and torchrec.name not in (None, "torchrec"):
        fix = f"torchrec needs {torchrec.name}: {_pip(f'install --no-deps {torchrec.name}')}"
    else:
        fix = f"this torchrec was made for another torch or fbgemm: {_install_command('torchrec')}"
    return Finding("torchrec", _reason(torchrec), "loads", "fault", fix)


# Machine: devices, threads, collectives, memory, disk.


def check_machine(output_dir: Path) -> Iterator[Finding]:
    """What the jobs run on; without torch, only what Python itself can tell."""
    yield _check_processor()
    torch = load("torch")
    if not isinstance(torch, Exception):
        yield _check_device(torch)
        yield _check_threads(torch.get_num_threads())
        yield _check_gloo(torch)
        yield _check_nccl(torch)
    yield _check_memory()
    yield _check_disk(output_dir)


def _check_processor() -> Finding:
    machine = platform.machine()
    if platform.system() != "Linux":
        fix = "fbgemm comes for Linux only: use a Linux machine or the Dockerfile"
        return Finding("processor", f"{platform.system()} {machine}", "Linux", "fault", fix)
    words = set(CPU_INFO.read_text().split())
    features = [
        name for name in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd") if name in words
    ]
    found = f"{machine} {' '.join(features)}"
    if machine == "x86_64" and "avx2" not in words:
        fix = "fbgemm needs AVX2: use a machine from 2015 or later"
        return Finding("processor", found, "avx2", "fault", fix)
    return Finding("processor", found)


def _check_device(torch: ModuleType) -> Finding:
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        found = ", ".join(f"{device.name} ({device.total_memory / GIB:.0f} GiB)" for device in devices)
        if installed_version("fbgemm-gpu-cpu"):
            return Finding("device", found, "fbgemm-gpu", "fault", _install_command("fbgemm-gpu"))
        return Finding("device", found)
    if not NVIDIA_DRIVER.exists():
        return Finding("device", "CPU, no GPU")
    if torch.version.cuda is None:
        fix = f"to use the GPU, in an environment of its own: {_pip('install .[cuda]')}"
        return Finding("device", "a GPU, but torch's CPU build", "", "warning", fix)
    fix = f"torch {torch.__version__} needs a driver for CUDA {torch.version.cuda} (`nvidia-smi` tells yours)"
    return Finding("device", "a GPU that torch cannot use", "", "warning", fix)


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and its container's share where one is set."""
    cores = len(os.sched_getaffinity(0))
    quota = _read_words(CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def _read_words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _check_threads(threads_per_rank: int) -> Finding:
    cores = usable_cores()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    setting = os.environ.get("OMP_NUM_THREADS", "not set")
    found = f"{ranks} x {threads_per_rank} on {cores} cores (OMP_NUM_THREADS {setting})"
    wanted = "ranks x threads <= cores"
    if ranks * threads_per_rank <= cores:
        return Finding("threads", found, wanted)
    fix = f"`export OMP_NUM_THREADS={max(1, cores // ranks)}`"
    if ranks > cores:
        fix += f", and start at most {cores} ranks"
    return Finding("threads", found, wanted, "warning", fix)


def _check_gloo(torch: ModuleType) -> Finding:
    """Form a gloo group of this process alone and sum over it."""
    dist: Any = torch.distributed
    wanted = "a group of one forms"
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("gloo", "not in this torch", wanted, "fault", _install_command("torch"))
    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        limit = datetime.timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        fix = f"`export GLOO_SOCKET_IFNAME=lo` (one machine), or write {platform.node()!r} into /etc/hosts"
        return Finding("gloo", _reason(error), wanted, "fault", fix)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return Finding("gloo", wanted, wanted)


def _check_nccl(torch: ModuleType) -> Finding:
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    if torch.cuda.is_available():
        return Finding("NCCL", "not in this torch", "present", "fault", _install_command("torch"))
    return Finding("NCCL", "not in this torch (no GPU, so none is due)")


def free_memory_bytes() -> int:
    """Memory that new work may take: what the kernel can give, within the container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit = _read_words(CGROUP / "memory.max")
    return min(available, int(limit[0])) if limit and limit[0] != "max" else available


def _check_memory() -> Finding:
    free = free_memory_bytes()
    found, wanted = f"{free / GIB:.1f} GiB free", f"{MIN_MEMORY_BYTES / GIB:.0f} GiB"
    if free >= MIN_MEMORY_BYTES:
        return Finding("memory", found, wanted)
    return Finding(
        "memory", found, wanted, "fault", "close other programs, or raise the container's memory limit"
    )


def _check_disk(output_dir: Path) -> Finding:
    folder = output_dir.absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found, wanted = f"{free / GIB:.1f} GiB free in {folder}", f"{MIN_DISK_BYTES / GIB:.0f} GiB, writable"
    if not os.access(folder, os.W_OK):
        fix = "name a folder that you may write to: output_dir=PATH"
        return Finding("disk", f"{folder} is not writable", wanted, "fault", fix)
    if free < MIN_DISK_BYTES:
        fix = "free some space, or name a folder on another disk: output_dir=PATH"
        return Finding("disk", found, wanted, "fault", fix)
    return Finding("disk", found, wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
