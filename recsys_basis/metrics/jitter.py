"""How unsteady the first steps of a training run are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

JITTER_STEPS = 200
"""Steps from the start of a run that are looked at."""
JITTER_WINDOW = 10


def loss_jitter(losses: Sequence[float]) -> float | None:
    """Mean over all windows of ``JITTER_WINDOW`` consecutive steps of the losses' sample standard deviation.

    losses: training loss of each step, from the first on. None with fewer steps than one window.
    """
    if len(losses) < JITTER_WINDOW:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(losses, dtype=np.float64), JITTER_WINDOW)
    return float(windows.std(axis=1, ddof=1).mean())
