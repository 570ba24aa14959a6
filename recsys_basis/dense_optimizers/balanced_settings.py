"""Settings of Balanced Adam with their bounds, for its Python class and its YAML section alike."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from recsys_basis.dense_optimizers.balanced_kernel import Kernel
from recsys_basis.dense_optimizers.balanced_signs import MAX_COUNTED_STEPS
from recsys_basis.schema import Section

StepCount = Annotated[int, Field(ge=0)]
CountedSteps = Annotated[int, Field(ge=0, le=MAX_COUNTED_STEPS)]
Factor = Annotated[float, Field(gt=0.0)]


class BalancedSettings(Section):
    """What ``BalancedAdam`` does beyond Adam; each may differ from parameter group to parameter group."""

    kernel: Kernel
    """What computes the phases below: C++, plain PyTorch, or auto, see ``balanced_kernel.py``."""
    early_steps: StepCount
    """Length of the early phase in steps; 0 is Adam."""
    group_scaling: bool
    """V times the ``group_scale`` of the parameter group."""
    groups: Literal["module", "cluster"]
    """module: that alone. cluster: the parameters of a ``kind`` are also split in two by the deviation of
    their gradients, and V of each half is multiplied by its mean deviation over the kind's."""
    dimension_scaling: bool
    """V of a weight times each output channel's gradient deviation over the mean of the channels."""
    scale_limit: Annotated[float, Field(ge=1.0)]
    """Cluster scale times channel scale stays in [1 / limit, limit], so a step within sqrt(limit)."""
    statistics: Literal["refresh", "freeze"]
    """Measured scales are taken from each step's gradient, or kept from the first."""
    masking: bool
    """Mask M and V in the first steps, of the early phase only."""
    mask_steps: CountedSteps
    mask_threshold: Annotated[float, Field(ge=0.0)]
    """V is masked below this share of its mean over the tensor."""
    mask_flips: CountedSteps
    """M is masked where the gradient's sign flipped more often than this."""
    masked_entry: Literal["floor", "hold"]
    """What an entry with a masked V does, see ``balanced_masking.py``."""
    kept_components: Annotated[float, Field(gt=0.0, le=1.0)] | None
    """Share of V's principal components that is read in the early phase; None: V itself."""
    rebalancing: bool
    """V by the steadiness of the gradient's sign, see ``balanced_rebalancing.py``."""
    rebalance_start: StepCount
    """Rebalancing acts in steps start < t <= end."""
    rebalance_end: StepCount
    rebalance_window: Annotated[int, Field(ge=1, le=MAX_COUNTED_STEPS)]
    """Steps over which flips are counted before V is judged again."""
    rebalance_flips: CountedSteps
    """More flips than this in a window count as flipping."""
    steady_factor: Factor
    """On V of entries whose sign stayed for a window; above 1 the step shrinks."""
    flipping_factor: Factor
    """On V of flipping entries; below 1 the step grows."""

    @model_validator(mode="after")
    def _phases_in_order(self) -> BalancedSettings:
        if self.rebalancing and not self.early_steps <= self.rebalance_start < self.rebalance_end:
            raise ValueError(
                f"rebalancing needs early_steps <= rebalance_start < rebalance_end, not "
                f"{self.early_steps}, {self.rebalance_start}, {self.rebalance_end}"
            )
        return self
