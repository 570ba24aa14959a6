"""An exponential moving average of the towers' weights, used for evaluation.

Tables are left out: their average would double the memory that this package exists to save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class TowerAverage:
    """average <- decay * average + (1 - decay) * weight after each step, from the initial weights on."""

    def __init__(self, towers: Sequence[tuple[str, nn.Parameter]], decay: float) -> None:
        """towers: named parameters; ``self.state`` maps their names to averages of the same shapes."""
        self._parameters = [parameter for _, parameter in towers]
        self.state = {name: parameter.detach().clone() for name, parameter in towers}
        self._update = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the average."""
        # torch's function takes a third argument that it does not use for an exponential average.
        self._update(list(self.state.values()), self._parameters, torch.empty(0))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model's towers hold the averages; afterwards their own weights again."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, parameter in zip(self.state.values(), self._parameters, strict=True):
            own = parameter.clone()
            parameter.copy_(average)
            average.copy_(own)
