"""A run asked to stop saves at one step on all ranks; resumed, it is the undisturbed run, bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from support.ranks import run_ranks
from support.tiny import tiny_config

from recsys_basis.checkpoints.folder import Record, list_checkpoints
from recsys_basis.training.loop import run_training
from recsys_basis.training.runtime import StuckError, collectives_named, new_cpu_group, start_runtime
from recsys_basis.training.spec import TrainConfig
from recsys_basis.training.stopping import Agreement, termination_noted


def after(calls: int) -> Callable[[], bool]:
    """Asks to stop from call number ``calls`` on."""
    count = itertools.count()
    return lambda: next(count) >= calls


def logits_of(folder: Path) -> np.ndarray:
    return pq.read_table(folder / "test_predictions.parquet")["logit"].to_numpy()


def evaluations(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "evaluation"]


@pytest.mark.parametrize(
    "calls, step, evaluated",
    [
        (7, 8, -1),  # in the step after, when all ranks know
        (9, 10, -1),  # in the evaluation due at step 10, which is cut
        (0, 1, -1),
        (26, 25, 20),  # in the last evaluation
    ],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    calls: int, step: int, evaluated: int, prepared: Path, tmp_path: Path, whole: Path
) -> None:
    config = tiny_config(prepared, tmp_path / "cut", *SETTINGS)
    assert run_training(config, stop_asked=after(calls)) is None
    (checkpoint,) = list_checkpoints(tmp_path / "cut" / "checkpoints")
    progress = Record.read(checkpoint).progress
    assert (progress.step, progress.evaluated_step) == (step, evaluated)
    assert not (tmp_path / "cut" / "result.json").exists()
    assert run_training(config) is not None
    assert evaluations(tmp_path / "cut") == evaluations(whole) == [10, 20, 25]
    assert np.array_equal(logits_of(tmp_path / "cut"), logits_of(whole))


SETTINGS = ("resume=auto", "evaluate_every_steps=10", "tower_average_decay=0.9")


@pytest.fixture(scope="module")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_training(tiny_config(prepared, folder, *SETTINGS))
    return folder


def stop_on_rank_1(config: TrainConfig) -> object:
    return run_training(config, stop_asked=after(6 if os.environ["RANK"] == "1" else 1000))


def test_one_rank_asked_stops_all_at_one_step(prepared: Path, tmp_path: Path) -> None:
    assert run_ranks(2, stop_on_rank_1, tiny_config(prepared, tmp_path / "run")) == [None, None]
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert Record.read(checkpoint).progress.step == 7


def test_torchrun_restarts_a_killed_run_and_sigterm_ends_it(prepared: Path, tmp_path: Path) -> None:
    """kill -9, then SIGTERM, to the process that trains: torchrun ends with 0, and nothing is lost."""
    overrides = ("batch_size=16", "epochs=3", "checkpoint_every_steps=20", "resume=auto")
    run_training(tiny_config(prepared, tmp_path / "whole", *overrides))
    config = tiny_config(prepared, tmp_path / "cut", *overrides)
    file = tmp_path / "train.py"
    file.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom support.tiny import tiny_config\n"
        "from recsys_basis.training.loop import run_training\n"
        "from recsys_basis.training.stopping import termination_noted\n"
        "with termination_noted() as asked:\n"
        "    config = tiny_config(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])\n"
        "    run_training(config, stop_asked=asked)\n"
    )
    arguments = [str(Path(__file__).parents[1]), str(prepared), config.output_dir, *overrides]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1"]
    port = ["--standalone", "--monitor-interval", "0.1"]
    launcher = subprocess.Popen([*command, *port, str(file), *arguments])
    try:
        first = trainer_of(launcher, tmp_path / "cut", 20)
        os.kill(first, signal.SIGKILL)
        killed_at = list_checkpoints(tmp_path / "cut" / "checkpoints")[-1].name
        second = trainer_of(launcher, tmp_path / "cut", int(killed_at.removeprefix("step-")) + 20)
        assert second != first
        os.kill(second, signal.SIGTERM)
        assert launcher.wait(120) == 0
    finally:
        launcher.kill()
    assert not (tmp_path / "cut" / "result.json").exists()
    assert run_training(config) is not None
    assert np.array_equal(logits_of(tmp_path / "cut"), logits_of(tmp_path / "whole"))


def trainer_of(launcher: subprocess.Popen[bytes], folder: Path, step: int) -> int:
    """Process id of the one rank, once its run has a checkpoint of ``step`` or later."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        checkpoints = list_checkpoints(folder / "checkpoints")
        if checkpoints and int(checkpoints[-1].name.removeprefix("step-")) >= step:
            return int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[0])
        assert launcher.poll() is None
        time.sleep(0.005)
    raise TimeoutError(f"no checkpoint of step {step}")


def test_sigterm_is_noted_inside_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with termination_noted() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
    assert signal.getsignal(signal.SIGTERM) is before


def stall(config: TrainConfig) -> str:
    """Rank 0 waits for rank 1, which comes too late."""
    with start_runtime(config.runtime) as runtime:
        agreement = Agreement(new_cpu_group(config.runtime))
        if runtime.rank == 1:
            time.sleep(4)
            return ""
        try:
            with collectives_named(config.runtime, lambda: "step 17"):
                agreement.say(stop=False, fault=False)
                agreement.hear()
        except StuckError as error:
            return str(error)
        return "nothing"


def test_a_stuck_collective_names_rank_and_step(prepared: Path, tmp_path: Path) -> None:
    config = tiny_config(prepared, tmp_path, "runtime.collective_timeout_s=2")
    words, _ = run_ranks(2, stall, config)
    assert words.startswith("rank 0, step 17: another rank did not answer within")
    assert "runtime.collective_timeout_s = 2" in words


def test_other_errors_stay_what_they_are(prepared: Path, tmp_path: Path) -> None:
    config = tiny_config(prepared, tmp_path).runtime
    with pytest.raises(RuntimeError, match=r"^shapes$"), collectives_named(config, lambda: "step 1"):
        raise RuntimeError("shapes")
    assert not dist.is_initialized()
