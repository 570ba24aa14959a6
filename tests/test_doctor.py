"""doctor: each fault it must name is simulated, and an intact environment passes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from recsys_basis import doctor
from recsys_basis.doctor import Finding

REQUIREMENTS = (
    "torch==2.13.0",
    "torchrec==1.8.0",
    "pandas>=3.0",
    'fbgemm-gpu==1.8.0; extra == "cuda"',
    'pytest>=8; extra == "dev"',
)
VERSIONS = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "pandas": "3.1.1", "fbgemm-gpu-cpu": "1.8.0"}


def install(folder: Path, name: str, version: str, *lines: str) -> None:
    """Make ``folder`` look as if pip had installed ``name`` into it, with more ``lines`` of metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    fields = ["Metadata-Version: 2.3", f"Name: {name}", f"Version: {version}", *lines]
    (info / "METADATA").write_text("\n".join(fields) + "\n")


def install_this_package(folder: Path, *requirements: str, python: str = ">=3.11") -> None:
    lines = [f"Requires-Dist: {requirement}" for requirement in requirements]
    install(folder, "recsys-basis", "0.1.0", f"Requires-Python: {python}", *lines)


@pytest.fixture
def no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path / "no_driver")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_driver: None) -> Path:
    """An empty folder that is all the installed packages there are."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


def packages_found(site: Path, **changes: str | None) -> dict[str, Finding]:
    """Findings by subject, where VERSIONS with ``changes`` (None: missing) are installed."""
    install_this_package(site, *REQUIREMENTS)
    changed = {name.replace("_", "-"): version for name, version in changes.items()}
    for name, version in (VERSIONS | changed).items():
        if version is not None:
            install(site, name, version)
    return {finding.subject: finding for finding in doctor.check_packages()}


def faults(findings: dict[str, Finding]) -> set[str]:
    return {subject for subject, finding in findings.items() if finding.verdict == "fault"}


def test_packages_as_wanted_are_no_fault(site: Path) -> None:
    findings = packages_found(site)
    assert set(findings) == {"python", "torch", "torchrec", "pandas", "fbgemm"}  # and no dev tools
    assert not faults(findings)
    assert "pip check" in findings["fbgemm"].found


def test_the_cuda_build_of_fbgemm_is_no_fault_either(site: Path) -> None:
    findings = packages_found(site, torch="2.13.0", fbgemm_gpu_cpu=None, fbgemm_gpu="1.8.0")
    assert not faults(findings)
    assert "pip check" not in findings["fbgemm"].found


@pytest.mark.parametrize(
    ("changes", "subject", "command"),
    [
        ({"torch": "2.15.0"}, "torch", f"--extra-index-url {doctor.TORCH_CPU_INDEX} torch==2.13.0+cpu"),
        ({"torch": None}, "torch", "torch==2.13.0+cpu"),
        ({"torchrec": "1.9.2"}, "torchrec", "install --force-reinstall --no-deps torchrec==1.8.0"),
        ({"pandas": "2.3.3"}, "pandas", "install 'pandas>=3.0'"),
        ({"pandas": None}, "pandas", "install 'pandas>=3.0'"),
        ({"fbgemm_gpu_cpu": "1.9.0"}, "fbgemm", "install --no-deps fbgemm-gpu-cpu==1.8.0"),
        ({"fbgemm_gpu_cpu": None}, "fbgemm", "install --no-deps fbgemm-gpu-cpu==1.8.0"),
        ({"fbgemm_gpu": "1.8.0"}, "fbgemm", "uninstall --yes fbgemm-gpu fbgemm-gpu-cpu"),
    ],
)
def test_a_wrong_or_missing_version_is_a_fault_with_its_command(
    site: Path, changes: dict[str, str | None], subject: str, command: str
) -> None:
    findings = packages_found(site, **changes)
    assert faults(findings) == {subject}
    version = next(iter(changes.values()))
    assert (version or "missing") in findings[subject].found
    assert command in findings[subject].fix
    assert f"{sys.executable} -m pip" in findings[subject].fix


def test_a_machine_with_an_nvidia_driver_gets_the_cuda_builds(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "driver"
    driver.touch()
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", driver)
    findings = packages_found(site, torch=None, fbgemm_gpu_cpu=None)
    assert findings["torch"].fix.endswith("install --force-reinstall torch==2.13.0`")
    assert findings["fbgemm"].fix.endswith("install --no-deps fbgemm-gpu==1.8.0`")


def test_an_old_python_is_a_fault(site: Path) -> None:
    install_this_package(site, "torch==2.13.0", python=">=3.99")
    install(site, "torch", "2.13.0")
    assert [(f.subject, f.wanted) for f in doctor.check_packages() if f.verdict == "fault"] == [
        ("python", ">=3.99")
    ]


def test_the_package_itself_must_be_installed(site: Path) -> None:
    (finding,) = doctor.check_packages()
    assert (finding.subject, finding.verdict) == ("recsys-basis", "fault")
    assert "make install" in finding.fix


# Binaries


def chained(text: str) -> OSError:
    """As torch.ops.load_library raises it: the reason is in the cause."""
    error = OSError("Could not load this library")
    error.__cause__ = OSError(text)
    return error


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch, no_driver: None) -> Callable[[str, Exception], None]:
    """``breaks(name, error)``: importing ``name`` raises ``error`` from now on."""
    real_import = doctor.importlib.import_module

    def break_import(broken: str, error: Exception) -> None:
        def importing(name: str) -> ModuleType:
            if name == broken:
                raise error
            return real_import(name)

        monkeypatch.setattr(doctor.importlib, "import_module", importing)

    pins = {"torch": "==2.13.0", "torchrec": "==1.8.0", "fbgemm-gpu": "==1.8.0", "tensorboard": ">=2.16"}
    wanted = {name: doctor.SpecifierSet(pin) for name, pin in pins.items()}
    monkeypatch.setattr(doctor, "wanted_versions", lambda: wanted)
    return break_import


def test_intact_binaries_are_no_fault() -> None:
    findings = {finding.subject: finding for finding in doctor.check_binaries()}
    assert set(findings) == {"torch", "fbgemm", "torchrec", "tensorboard"}
    assert not faults(findings)


@pytest.mark.parametrize(
    ("module", "error", "subject", "words", "command"),
    [
        (
            "torch",
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            "torch",
            "",
            "torch==2.13.0+cpu",
        ),
        (
            "torch",
            ImportError("libcudnn.so.9: cannot open shared object file"),
            "torch",
            "CUDA build without its CUDA libraries",
            "torch==2.13.0+cpu",
        ),
        ("torch", ModuleNotFoundError(name="sympy"), "torch", "torch needs sympy", "install sympy"),
        (
            "fbgemm_gpu",
            chained("fbgemm_gpu_py.so: undefined symbol: _ZN5torch8autograd"),
            "fbgemm",
            f"built for another torch than {torch.__version__} (ABI mismatch)",
            "install --no-deps fbgemm-gpu-cpu==1.8.0",
        ),
        (
            "fbgemm_gpu",
            chained("libnvidia-ml.so.1: cannot open shared object file"),
            "fbgemm",
            "needs an NVIDIA driver",
            "fbgemm-gpu-cpu==1.8.0",
        ),
        ("fbgemm_gpu", ModuleNotFoundError(name="fbgemm_gpu"), "fbgemm", "", "fbgemm-gpu-cpu==1.8.0"),
        (
            "torchrec",
            ImportError("cannot import name 'x' from 'torch'"),
            "torchrec",
            "another torch or fbgemm",
            "torchrec==1.8.0",
        ),
        (
            "torchrec",
            ModuleNotFoundError(name="tensordict"),
            "torchrec",
            "torchrec needs tensordict",
            "install --no-deps tensordict",
        ),
        (
            "torch.utils.tensorboard",
            ModuleNotFoundError(name="tensorboard"),
            "tensorboard",
            "",
            "'tensorboard>=2.16'",
        ),
    ],
)
def test_a_binary_that_does_not_load_is_explained(
    breaks: Callable[[str, Exception], None],
    module: str,
    error: Exception,
    subject: str,
    words: str,
    command: str,
) -> None:
    breaks(module, error)
    findings = {finding.subject: finding for finding in doctor.check_binaries()}
    assert faults(findings) == {subject}
    cause = error.__cause__ or error
    assert findings[subject].found == f"{type(cause).__name__}: {cause}"
    assert words in findings[subject].fix
    assert command in findings[subject].fix


def test_fbgemm_for_cuda_beside_torch_for_cpu_is_told(
    breaks: Callable[[str, Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    breaks("fbgemm_gpu", chained("libtorch_cuda.so: cannot open shared object file"))
    findings = {finding.subject: finding for finding in doctor.check_binaries()}
    assert "CUDA build beside a CPU build of torch" in findings["fbgemm"].fix


@pytest.mark.parametrize(
    ("operators", "found"),
    [
        (SimpleNamespace(), "asynchronous_complete_cumsum"),
        (SimpleNamespace(asynchronous_complete_cumsum=lambda x: torch.zeros(3)), "[0.0, 0.0, 0.0]"),
    ],
)
def test_fbgemm_whose_operators_are_missing_or_wrong_is_an_abi_mismatch(
    monkeypatch: pytest.MonkeyPatch, no_driver: None, operators: SimpleNamespace, found: str
) -> None:
    monkeypatch.setattr(torch, "ops", SimpleNamespace(fbgemm=operators))
    monkeypatch.setattr(doctor, "load", {"torch": torch, "fbgemm_gpu": ModuleType("fbgemm_gpu")}.get)
    findings = {finding.subject: finding for finding in doctor.check_binaries()}
    assert findings["fbgemm"].verdict == "fault"
    assert found in findings["fbgemm"].found
    assert "ABI mismatch" in findings["fbgemm"].fix
    assert "torchrec" not in findings  # it would only say the same


def test_loading_leaves_logging_on(breaks: Callable[[str, Exception], None]) -> None:
    breaks("torch", OSError("broken"))
    assert isinstance(doctor.load("torch"), OSError)
    assert logging.getLogger().isEnabledFor(logging.CRITICAL)


# Machine


@pytest.mark.parametrize(("free", "verdict"), [(2 * 1024**3, "ok"), (2 * 1024**3 - 1, "fault")])
def test_low_memory_is_a_fault(monkeypatch: pytest.MonkeyPatch, free: int, verdict: str) -> None:
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: free)
    finding = doctor._check_memory()
    assert finding.verdict == verdict
    assert bool(finding.fix) == (verdict == "fault")


@pytest.mark.parametrize(("limit", "expected"), [("1048576", 1048576), ("max", None), (None, None)])
def test_free_memory_keeps_within_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, expected: int | None
) -> None:
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    free = doctor.free_memory_bytes()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert free == expected if expected else 1048576 < free <= total


@pytest.mark.parametrize(("free", "verdict"), [(1024**3, "ok"), (1024**3 - 1, "fault")])
def test_low_disk_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, verdict: str
) -> None:
    asked = []
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=free)
    )
    finding = doctor._check_disk(tmp_path / "not" / "there")
    assert finding.verdict == verdict
    assert asked == [tmp_path]  # the folder in which output_dir would be made
    assert ("output_dir=PATH" in finding.fix) == (verdict == "fault")


def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: not (path == tmp_path and mode == os.W_OK))
    finding = doctor._check_disk(tmp_path / "runs")
    assert finding.verdict == "fault"
    assert "not writable" in finding.found


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1), (None, 8)]
)
def test_usable_cores_are_the_affinity_within_the_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda process: set(range(8)))
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert doctor.usable_cores() == cores


@pytest.mark.parametrize(
    ("ranks", "threads", "fix"),
    [
        (None, 4, ""),
        (None, 5, "`export OMP_NUM_THREADS=4`"),
        (2, 2, ""),
        (2, 3, "`export OMP_NUM_THREADS=2`"),
        (8, 1, "`export OMP_NUM_THREADS=1`, and start at most 4 ranks"),
    ],
)
def test_more_threads_than_cores_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, ranks: int | None, threads: int, fix: str
) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    finding = doctor._check_threads(threads)
    assert finding.verdict == ("warning" if fix else "ok")
    assert finding.fix == fix
    assert finding.found == f"{ranks or 1} x {threads} on 4 cores (OMP_NUM_THREADS 7)"


def cuda_torch(num_gpus: int, build: str | None = "13.0", nccl: bool = True) -> SimpleNamespace:
    """As much of a torch as the device checks ask."""
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=141 * 1024**3)
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=build),
        cuda=SimpleNamespace(
            is_available=lambda: num_gpus > 0,
            device_count=lambda: num_gpus,
            get_device_properties=lambda number: gpu,
            nccl=SimpleNamespace(version=lambda: (2, 29, 7)),
        ),
        distributed=SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: nccl),
    )


@pytest.mark.parametrize(
    ("num_gpus", "build", "driver", "fbgemm", "found", "verdict", "fix"),
    [
        (2, "13.0", True, "fbgemm-gpu", "NVIDIA H200 (141 GiB), NVIDIA H200 (141 GiB)", "ok", ""),
        (1, "13.0", True, "fbgemm-gpu-cpu", "NVIDIA H200 (141 GiB)", "fault", "--no-deps fbgemm-gpu"),
        (0, "13.0", True, "fbgemm-gpu", "a GPU that torch cannot use", "warning", "driver for CUDA 13.0"),
        (0, None, True, "fbgemm-gpu-cpu", "a GPU, but torch's CPU build", "warning", "install .[cuda]"),
        (0, None, False, "fbgemm-gpu-cpu", "CPU, no GPU", "ok", ""),
    ],
)
def test_devices(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    build: str | None,
    driver: bool,
    fbgemm: str,
    found: str,
    verdict: str,
    fix: str,
) -> None:
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", site if driver else site / "none")
    install(site, fbgemm, "1.8.0")
    finding = doctor._check_device(cuda_torch(num_gpus, build))
    assert (finding.found, finding.verdict) == (found, verdict)
    assert fix in finding.fix
    assert bool(fix) == bool(finding.fix)


@pytest.mark.parametrize(
    ("num_gpus", "nccl", "verdict"), [(1, True, "ok"), (1, False, "fault"), (0, False, "ok")]
)
def test_nccl_is_due_where_there_is_a_gpu(num_gpus: int, nccl: bool, verdict: str) -> None:
    finding = doctor._check_nccl(cuda_torch(num_gpus, nccl=nccl))
    assert finding.verdict == verdict
    assert ("2.29.7" in finding.found) == nccl


def test_gloo_forms_a_group_and_leaves_none() -> None:
    assert doctor._check_gloo(torch).verdict == "ok"
    assert not dist.is_initialized()


def test_gloo_without_an_interface_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    finding = doctor._check_gloo(torch)
    assert finding.verdict == "fault"
    assert "no_such_interface" in finding.found
    assert "GLOO_SOCKET_IFNAME=lo" in finding.fix
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("system", "flags", "verdict"),
    [("Linux", "fpu avx2 fma", "ok"), ("Linux", "fpu avx", "fault"), ("Darwin", "avx2", "fault")],
)
def test_the_processor_must_run_fbgemm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, flags: str, verdict: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(doctor, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(doctor.platform, "system", lambda: system)
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    finding = doctor._check_processor()
    assert finding.verdict == verdict
    assert bool(finding.fix) == (verdict == "fault")


# The command


@pytest.fixture
def sound_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real environment, with this package's metadata in place and memory and disk to spare."""
    install_this_package(tmp_path, "torch", "torchrec", 'fbgemm-gpu; extra == "cuda"')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "MIN_MEMORY_BYTES", 1)
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 1)


def test_exit_code_0_when_all_is_well(
    sound_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main([f"output_dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "nothing is at fault" in printed
    assert "FIX" not in printed


def test_exit_code_1_with_the_fix_for_each_fault(
    sound_machine: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "MIN_MEMORY_BYTES", 2**60)
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 2**60)
    assert doctor.main([f"output_dir={tmp_path}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("FIX")] == ["FIX memory", "FIX disk"]
    assert lines[-1].startswith("2 at fault")


def test_a_warning_leaves_the_exit_code_0(
    sound_machine: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert doctor.main([f"output_dir={tmp_path}"]) == 0
    assert "FIX threads" in capsys.readouterr().out


def test_a_crash_while_loading_hides_no_package_fault(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(name: str) -> ModuleType:
        raise SystemExit(139)

    install_this_package(site, "torch==2.13.0")
    monkeypatch.setattr(doctor, "load", crash)
    with pytest.raises(SystemExit):
        doctor.main([])
    assert "FIX torch" in capsys.readouterr().out


def test_a_fix_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    fix = "`pip install .[cuda]` " + "and more " * 30 + "[/red]"
    doctor.print_section("[title]", [Finding("a", "b [c]", "", "fault", fix)])
    assert f"FIX a: {fix}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("argument", ["outputs", "output_dir=", "output=x", "--verbose"])
def test_an_unknown_argument_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([argument]) == 2
    assert repr(argument) in capsys.readouterr().err


def test_help_checks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--help"]) == 0
    assert "output_dir=PATH" in capsys.readouterr().out


def test_the_command_line_survives_without_torch_fbgemm_and_torchrec() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, torchrec=None, fbgemm_gpu=None)\n"
        "from recsys_basis.cli import main; sys.exit(main(['doctor']))"
    )
    root = Path(doctor.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "FIX torch" in done.stdout
    assert "Traceback" not in done.stderr
