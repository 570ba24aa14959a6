"""Memory against a known allocation, optimizer bytes against formulas, rows/s on a fake clock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from recsys_basis.metrics import resources
from recsys_basis.metrics.resources import RowMeter, optimizer_state_bytes, peak_memory_bytes

MEBIBYTE = 2**20


def _run_alone(script: str) -> list[int]:
    """The numbers that ``script`` prints in a small process of its own, which is spared loading torch."""
    start = "import sys; sys.modules['torch'] = __import__('unittest.mock').mock.MagicMock()\n"
    start += "from recsys_basis.metrics.resources import peak_memory_bytes as peak\n"
    result = subprocess.run(
        [sys.executable, "-c", start + script], capture_output=True, text=True, check=True
    )
    return [int(number) for number in result.stdout.split()]


def test_peak_memory_sees_an_allocation_and_keeps_it() -> None:
    before, held, freed = _run_alone(
        "before = peak(); block = bytearray(b'1') * 200 * 2**20; held = peak(); del block\n"
        "print(before, held, peak())"
    )
    assert MEBIBYTE < before < 100 * MEBIBYTE
    assert held - before == pytest.approx(200 * MEBIBYTE, abs=2 * MEBIBYTE)
    assert freed == pytest.approx(held, abs=MEBIBYTE)  # the kernel counts pages per core, hence not exactly


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows a peak that is the process's own")
def test_peak_memory_is_not_the_parents() -> None:
    block = bytearray(b"1") * 200 * MEBIBYTE
    assert _run_alone("print(peak())")[0] < len(block) < peak_memory_bytes()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 4 * 12 + 2 * 5),
        # exp_avg and exp_avg_sq, and a float32 step count a parameter
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.1), 2 * (4 * 12 + 2 * 5) + 2 * 4),
        (
            lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
            3 * (4 * 12 + 2 * 5) + 2 * 4,
        ),
    ],
)
def test_optimizer_state_bytes(make: Callable[..., torch.optim.Optimizer], expected: int) -> None:
    parameters = [
        torch.nn.Parameter(torch.ones(3, 4)),
        torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16)),
    ]
    optimizer = make(parameters)
    assert optimizer_state_bytes(optimizer) == 0
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == expected


class _Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def perf_counter(self) -> float:
        return self.seconds


def test_row_meter_leaves_out_warm_up_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(resources, "time", clock)
    meter = RowMeter(warmup_steps=2)
    for seconds in (50.0, 30.0):
        clock.seconds += seconds
        meter.add(256)
        assert meter.rows_per_second is None
    clock.seconds += 0.5
    meter.add(256)
    with meter.paused():
        clock.seconds += 700.0
    clock.seconds += 1.5
    meter.add(100)  # a short last batch counts as what it is
    assert meter.rows_per_second == pytest.approx((256 + 100) / (0.5 + 1.5))


def test_row_meter_without_warm_up_counts_from_its_making(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(resources, "time", clock)
    meter = RowMeter(warmup_steps=0)
    with meter.paused():
        clock.seconds += 9.0
    clock.seconds += 2.0
    meter.add(10)
    assert meter.rows_per_second == pytest.approx(5.0)
