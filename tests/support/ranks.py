"""Run a function on several gloo ranks, each a process of its own, and collect what it returns."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

LAUNCHER = """
import os, sys, cloudpickle, torch
torch.set_num_threads(1)
folder, rank = sys.argv[1], sys.argv[2]
with open(f"{folder}/call", "rb") as file:
    function, arguments = cloudpickle.load(file)
with open(f"{folder}/{rank}", "wb") as file:
    cloudpickle.dump(function(*arguments), file)
"""


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, ranks_per_node: int | None = None
) -> list[Any]:
    """What ``function(*arguments)`` returns on ranks 0..world_size - 1, under torchrun's environment.

    ``ranks_per_node``: what TorchRec takes for the size of a node; all ranks by default.

    A test module travels by value, since it cannot be imported elsewhere; ``support`` can.
    """
    cloudpickle.register_pickle_by_value(sys.modules[__package__ or __name__])
    if not function.__module__.startswith("recsys_basis."):  # by value it could not be pickled a second time
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "call").write_bytes(cloudpickle.dumps((function, arguments)))
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(ranks_per_node or world_size),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, folder, str(rank)],
                env=environment
                | {"RANK": str(rank), "LOCAL_RANK": str(rank % (ranks_per_node or world_size))},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world_size)
        ]
        outputs = [process.communicate(timeout=400)[0] for process in ranks]
        for process, output in zip(ranks, outputs, strict=True):
            assert process.returncode == 0, output
        return [cloudpickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
