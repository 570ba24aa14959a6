"""What a run costs: peak memory of the process, bytes of optimizer state, rows a second."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def peak_memory_bytes() -> int:
    """Largest resident set of this process so far, in bytes; it stays when memory is freed."""
    # Linux: the kernel's own mark where it shows one, since getrusage hands a child its parent's peak.
    status = Path("/proc/self/status")
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    if peak is not None:
        return int(peak[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes, others KiB


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors that ``optimizer`` keeps now; 0 before its first step."""
    return sum(
        value.nbytes
        for parameter_state in optimizer.state.values()
        for value in parameter_state.values()
        if isinstance(value, torch.Tensor)
    )


class RowMeter:
    """Rows a second since the first ``warmup_steps`` steps, which pay for allocation and caches.

    Call ``add`` at the end of each step, and evaluate or save inside ``with meter.paused():``.
    """

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self._num_steps = 0
        self._num_rows = 0
        self._seconds = 0.0
        self._last = time.perf_counter()

    def add(self, num_rows: int) -> None:
        """A step over ``num_rows`` rows has just ended."""
        now = time.perf_counter()
        if self._num_steps >= self._warmup_steps:
            self._num_rows += num_rows
            self._seconds += now - self._last
        self._num_steps += 1
        self._last = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._last += time.perf_counter() - start

    @property
    def rows_per_second(self) -> float | None:
        """None while no step after the warm-up has ended."""
        return self._num_rows / self._seconds if self._seconds > 0.0 else None
