"""Flips are counted for every entry, over any shape, and zeros are no sign."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from recsys_basis.dense_optimizers.balanced_signs import count_flips, forget_flips, sign_counters


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)], ids=str)
def test_flips_as_counted_by_hand(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    gradients = random.integers(-1, 2, size=(40, *shape))
    state: dict[str, Any] = {}
    for step, gradient in enumerate(gradients, start=1):
        counters = sign_counters(state, torch.zeros(shape))
        count_flips(counters, torch.as_tensor(gradient, dtype=torch.float32))
        for i in np.ndindex(shape):
            signs = [value for value in gradients[(slice(step), *i)] if value != 0]
            flips = sum(a != b for a, b in itertools.pairwise(signs))
            assert counters.num_flips[i].item() == flips


def test_two_bytes_an_entry_and_none_after() -> None:
    state: dict[str, Any] = {"step": 1}
    sign_counters(state, torch.ones(10))
    assert sum(state[name].nbytes for name in ("last_sign", "num_flips")) == 20
    forget_flips(state)
    assert state == {"step": 1}


def test_a_gradient_is_not_kept_alive_or_changed() -> None:
    gradient = torch.tensor([1.0, 0.0, -2.0])
    counters = sign_counters({}, gradient)
    count_flips(counters, gradient)
    count_flips(counters, -gradient)
    assert torch.equal(gradient, torch.tensor([1.0, 0.0, -2.0]))
    assert counters.last_sign.tolist() == [-1, 0, 1]
