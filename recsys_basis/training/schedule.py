"""Learning-rate factor of a step, one for towers and embedding rows together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from recsys_basis.schema import Section


class ScheduleConfig(Section):
    """Section ``schedule``; see configs/schedule/*.yaml."""

    decay: Literal["constant", "linear", "polynomial"]
    warmup_steps: Annotated[int, Field(ge=0)]
    """Steps over which the factor rises linearly to 1."""
    power: Annotated[float, Field(gt=0.0)]
    """Exponent of polynomial decay; linear is power 1."""
    final_factor: Annotated[float, Field(ge=0.0, le=1.0)]
    """Where linear and polynomial decay end: the factor that a step after the last one would have."""


def learning_rate_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """Factor in [0, 1] of step ``step`` = 0..num_steps - 1, which multiplies every learning rate.

    Warm-up: (step + 1) / warmup_steps. Then with x = the share of the remaining steps done:
    final + (1 - final) * (1 - x) ** power.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    power = 1.0 if config.decay == "linear" else config.power
    return config.final_factor + (1.0 - config.final_factor) * (1.0 - min(1.0, done)) ** power
