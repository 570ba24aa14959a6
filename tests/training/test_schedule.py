"""Learning-rate factors against torch's own schedulers."""

from __future__ import annotations

import pytest
import torch

from recsys_basis.schema import ConfigError, parse_section
from recsys_basis.training.schedule import ScheduleConfig, learning_rate_factor


def schedule(**changes: object) -> ScheduleConfig:
    values = {"decay": "constant", "warmup_steps": 0, "power": 1.0, "final_factor": 0.0} | changes
    return parse_section(ScheduleConfig, values, where="schedule")


def torch_factors(scheduler_type: type, steps: int, **arguments: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = scheduler_type(optimizer, **arguments)
    factors = []
    for _ in range(steps):
        factors.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return factors


def test_linear_decay_is_torch_s() -> None:
    config = schedule(decay="linear", final_factor=0.1)
    ours = [learning_rate_factor(config, step, 50) for step in range(50)]
    expected = torch_factors(
        torch.optim.lr_scheduler.LinearLR, 50, start_factor=1.0, end_factor=0.1, total_iters=50
    )
    assert ours == pytest.approx(expected)


def test_polynomial_decay_is_torch_s() -> None:
    config = schedule(decay="polynomial", power=2.0)
    ours = [learning_rate_factor(config, step, 50) for step in range(50)]
    expected = torch_factors(torch.optim.lr_scheduler.PolynomialLR, 50, total_iters=50, power=2.0)
    assert ours == pytest.approx(expected)


def test_warm_up_rises_linearly_to_one_then_decays_over_the_rest() -> None:
    config = schedule(decay="linear", warmup_steps=10)
    factors = [learning_rate_factor(config, step, 110) for step in range(110)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == 1.0 and factors[60] == pytest.approx(0.5) and factors[109] == pytest.approx(0.01)


def test_constant() -> None:
    assert {learning_rate_factor(schedule(), step, 9) for step in range(9)} == {1.0}


def test_warm_up_longer_than_the_run_never_divides_by_zero() -> None:
    config = schedule(decay="linear", warmup_steps=10)
    assert learning_rate_factor(config, 4, 5) == 0.5
    assert 0.0 <= learning_rate_factor(config, 10, 10) <= 1.0


@pytest.mark.parametrize(
    "key, value", [("warmup_steps", -1), ("power", 0.0), ("final_factor", 1.5), ("decay", "cosine")]
)
def test_bounds_name_the_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"schedule.{key}"):
        schedule(**{key: value})
