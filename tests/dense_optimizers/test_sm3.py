"""SM3 against loops over entries in float64, Adagrad, Adam, and the paper's inequality."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_basis.dense_optimizers import SM3
from recsys_basis.metrics.resources import optimizer_state_bytes

SHAPES = ((), (4,), (3, 5), (2, 3, 4), (2, 1, 3, 2))
LR = 0.3


def gradients_of(shape: tuple[int, ...], steps: int, seed: int = 0) -> list[np.ndarray]:
    """Heavy-tailed, with zero entries, and a first row that has no gradient for a while."""
    random = np.random.default_rng(seed)
    drawn = [random.standard_t(2, size=shape) * (random.random(shape) < 0.7) for _ in range(steps)]
    for gradient in drawn[: steps // 2]:
        if gradient.ndim:
            gradient[0] = 0.0
    return [np.asarray(gradient) for gradient in drawn]


def loop(
    shape: tuple[int, ...], gradients: list[np.ndarray], **options: Any
) -> tuple[np.ndarray, list[np.ndarray]]:
    """(weights from zero, nu of every step), entry by entry from the formulas of the paper."""
    variant, beta2 = options.get("variant", "II"), options.get("beta2")
    momentum, eps, decay = (
        options.get("momentum", 0.0),
        options.get("eps", 0.0),
        options.get("weight_decay", 0.0),
    )
    keep, add = (1.0, 1.0) if beta2 is None else (beta2, 1.0 - beta2)
    entries = list(itertools.product(*(range(size) for size in shape)))
    # The covers that hold an entry: its slices along each axis; up to rank 1, the entry alone.
    slices = {i: [(axis, i[axis]) for axis in range(len(shape))] if len(shape) > 1 else [i] for i in entries}
    cover = {r: 0.0 for covering in slices.values() for r in covering}
    weights, average = np.ones(shape), np.zeros(shape)
    history = []
    for step, gradient in enumerate(gradients, start=1):
        nu = np.zeros(shape)
        if variant == "II":
            new = dict.fromkeys(cover, 0.0)
            for i in entries:
                nu[i] = keep * min(cover[r] for r in slices[i]) + add * gradient[i] ** 2
                for r in slices[i]:
                    new[r] = max(new[r], nu[i])
            cover = new
        else:
            for r in cover:
                largest = max(gradient[i] ** 2 for i in entries if r in slices[i])
                if variant == "max" and beta2 is None and len(shape) > 1:
                    cover[r] = max(cover[r], largest)
                else:
                    cover[r] = keep * cover[r] + add * largest
            pick = max if variant == "max" else min
            for i in entries:
                nu[i] = pick(cover[r] for r in slices[i])
        if beta2 is not None:
            nu = nu / (1.0 - beta2**step)
        history.append(nu)
        with np.errstate(invalid="ignore"):
            direction = np.where(gradient == 0.0, 0.0, gradient / np.sqrt(nu + eps))
        average = momentum * average + (1.0 - momentum) * direction
        weights = weights * (1.0 - LR * decay) - LR * (average if momentum else direction)
    return weights, history


def train(
    shape: tuple[int, ...], gradients: list[np.ndarray], dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = SM3([parameter], lr=LR, **options)
    for gradient in gradients:
        parameter.grad = torch.as_tensor(gradient, dtype=dtype)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["I", "II", "max"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"beta2": 0.9, "eps": 1e-3},
        {"beta2": 0.99, "momentum": 0.5},
    ],
    ids=str,
)
def test_as_the_loop_over_entries(shape: tuple[int, ...], variant: str, options: dict[str, Any]) -> None:
    gradients = gradients_of(shape, steps=12)
    expected, _ = loop(shape, gradients, variant=variant, **options)
    trained = train(shape, gradients, torch.float64, variant=variant, **options)
    torch.testing.assert_close(trained, torch.as_tensor(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", ["I", "II", "max"])
def test_float32_follows_the_loop(variant: str) -> None:
    gradients = gradients_of((3, 5), steps=50)
    expected, _ = loop((3, 5), gradients, variant=variant)
    trained = train((3, 5), gradients, torch.float32, variant=variant)
    torch.testing.assert_close(trained.double(), torch.as_tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["I", "II", "max"])
@pytest.mark.parametrize("shape", [(), (7,)], ids=str)
def test_is_adagrad_up_to_rank_1(shape: tuple[int, ...], variant: str) -> None:
    gradients = [
        gradient + 0.01 for gradient in gradients_of(shape, steps=30)
    ]  # torch's Adagrad makes 0/0 NaN
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
    adagrad = torch.optim.Adagrad([parameter], lr=LR, eps=0.0)
    for gradient in gradients:
        parameter.grad = torch.as_tensor(gradient)
        adagrad.step()
    torch.testing.assert_close(train(shape, gradients, torch.float64, variant=variant), parameter.detach())


def test_averaged_form_is_adam_without_momentum_at_rank_1() -> None:
    gradients = gradients_of((7,), steps=30)
    parameter = torch.nn.Parameter(torch.ones(7, dtype=torch.float64))
    adam = torch.optim.Adam([parameter], lr=LR, betas=(0.0, 0.99), eps=1e-30)
    for gradient in gradients:
        parameter.grad = torch.as_tensor(gradient)
        adam.step()
    trained = train((7,), gradients, torch.float64, beta2=0.99)
    torch.testing.assert_close(trained, parameter.detach(), rtol=1e-10, atol=1e-12)


@st.composite
def gradient_sequences(draw: st.DrawFn) -> tuple[tuple[int, ...], list[np.ndarray]]:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    size = math.prod(shape)
    entries = st.floats(-8.0, 8.0, width=32).map(lambda value: value if abs(value) > 1e-3 else 0.0)
    steps = draw(st.lists(st.lists(entries, min_size=size, max_size=size), min_size=1, max_size=5))
    return shape, [np.array(step).reshape(shape) for step in steps]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(gradient_sequences(), st.sampled_from([None, 0.5, 0.9]))
def test_second_moments_are_ordered_as_the_paper_proves(
    drawn: tuple[tuple[int, ...], list[np.ndarray]], beta2: float | None
) -> None:
    """sum of g^2 <= nu_II <= nu_I (with beta2: the averages), read from the steps w -= g / sqrt(nu)."""
    shape, gradients = drawn
    parameters = {
        variant: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for variant in ("I", "II")
    }
    optimizers = {name: SM3([p], lr=1.0, variant=name, beta2=beta2) for name, p in parameters.items()}
    total = np.zeros(shape)
    for step, gradient in enumerate(gradients, start=1):
        total = total + gradient**2 if beta2 is None else beta2 * total + (1.0 - beta2) * gradient**2
        exact = total if beta2 is None else total / (1.0 - beta2**step)
        nu = {}
        for name, parameter in parameters.items():
            before = parameter.detach().clone()
            parameter.grad = torch.as_tensor(gradient)
            optimizers[name].step()
            moved = (before - parameter.detach()).numpy()
            assert ((gradient == 0.0) == (moved == 0.0)).all()
            nu[name] = np.where(gradient == 0.0, np.nan, gradient / np.where(moved == 0.0, 1.0, moved)) ** 2
        seen = gradient != 0.0
        assert (exact[seen] <= nu["II"][seen] * (1.0 + 1e-9)).all()
        assert (nu["II"][seen] <= nu["I"][seen] * (1.0 + 1e-9)).all()


def test_state_is_the_sum_of_the_axes_lengths() -> None:
    large = torch.nn.Parameter(torch.empty(10_000, 10_000, device="meta"))  # shapes without the 400 MB
    optimizer = SM3([large])
    large.grad = torch.empty_like(large)
    optimizer.step()
    assert sum(value.numel() for value in optimizer.state[large].values()) == 20_000
    assert optimizer_state_bytes(optimizer) == 80_000


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4 * (2 + 3 + 5)),
        ({"momentum": 0.9}, 4 * (2 + 3 + 5) + 4 * 30),
        ({"momentum": 0.9, "bfloat16_momentum": True}, 4 * (2 + 3 + 5) + 2 * 30),
        ({"beta2": 0.9}, 4 * (2 + 3 + 5) + 4),
    ],
)
def test_bytes_of_state(options: dict[str, Any], expected: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3, 5))
    optimizer = SM3([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == expected


def test_bfloat16_momentum_follows_the_full_one() -> None:
    gradients = gradients_of((3, 5), steps=40)
    full = train((3, 5), gradients, torch.float32, momentum=0.9)
    short = train((3, 5), gradients, torch.float32, momentum=0.9, bfloat16_momentum=True)
    assert not torch.equal(full, short)
    # 8 bits of mantissa: each step is off by up to 1/256 of momenta below 1, and beta1 sums ten of them.
    torch.testing.assert_close(short, full, rtol=0.0, atol=40 * LR / 256)


@pytest.mark.parametrize("variant", ["I", "II", "max"])
def test_zero_and_vanishing_gradients_move_nothing_far(variant: str) -> None:
    gradient = np.array([[0.0, 1e-30], [0.0, 0.0]])  # its square is zero in float32
    moved = train((2, 2), [gradient, gradient], torch.float32, variant=variant) - 1.0
    assert (moved.abs() <= 1e-3).all()
    assert (moved[torch.as_tensor(gradient) == 0.0] == 0.0).all()


def test_tensor_learning_rate_is_read_where_it_lies() -> None:
    """On the meta device a read on the host would raise."""
    parameter = torch.nn.Parameter(torch.empty(3, 4, device="meta"))
    optimizer = SM3([parameter], lr=torch.empty((), device="meta"), beta2=0.9, momentum=0.9, weight_decay=0.1)
    parameter.grad = torch.empty_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr = -1.0, must be >= 0"),
        ({"lr": torch.ones(1)}, r"lr has shape \[1\]"),
        ({"variant": "III"}, "variant = 'III', must be one of I, II, max"),
        ({"momentum": 1.0}, "momentum = 1.0"),
        ({"beta2": 0.0}, "beta2 = 0.0"),
        ({"eps": -1e-8}, "eps = -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1"),
    ],
)
def test_settings_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SM3([torch.nn.Parameter(torch.ones(2))], **options)


def test_settings_of_a_group_are_checked_too() -> None:
    optimizer = SM3([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="momentum = 2"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "momentum": 2.0})
