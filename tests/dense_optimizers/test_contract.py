"""What every dense optimizer must do, whatever its formula. A new one enters by one line of OPTIMIZERS."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.optim import Optimizer

from recsys_basis.dense_optimizers import (
    DENSE_OPTIMIZERS,
    create_dense_optimizer,
    dense_optimizer_defaults,
)
from recsys_basis.metrics.resources import optimizer_state_bytes


@dataclass(frozen=True)
class Case:
    """One row of the contract table."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    state_bytes: int = 0
    """Of a [7, 5] weight and a [5] bias after a step: 40 entries; a count of steps is 4 bytes each."""
    rates: tuple[float, float] = (0.3, 1.0)
    """Learning rates for the two problems of convergence, quadratic and logistic regression."""

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


ADAM_BYTES = 2 * 4 * 40 + 2 * 4
COUNTER_BYTES = 2 * 40
"""Sign and flips, in the first steps of Balanced Adam."""
OPTIMIZERS = [
    Case("adamw", {}, ADAM_BYTES),
    Case("adamw", {"weight_decay": 0.1}, ADAM_BYTES),
    Case("sm3", {}, 4 * (12 + 5) + 4 * 40),
    Case("sm3", {"momentum": 0.0}, 4 * (12 + 5)),
    Case("sm3", {"momentum": 0.0, "variant": "I"}, 4 * (12 + 5)),
    Case("sm3", {"momentum": 0.0, "variant": "max", "eps": 1e-12}, 4 * (12 + 5)),
    Case("sm3", {"bfloat16_momentum": True}, 4 * (12 + 5) + 2 * 40),
    Case("sm3", {"beta2": 0.99, "weight_decay": 0.1}, 4 * (12 + 5) + 4 * 40 + 2 * 4),
    Case("balanced_adam", {}, ADAM_BYTES + COUNTER_BYTES),
    Case("balanced_adam", {"kernel": "torch"}, ADAM_BYTES + COUNTER_BYTES),
    Case("balanced_adam", {"masked_entry": "hold"}, ADAM_BYTES + COUNTER_BYTES),
    # Frozen: a scale for each of 7 channels, and one for the bias.
    Case(
        "balanced_adam",
        {"groups": "cluster", "statistics": "freeze", "weight_decay": 0.1},
        ADAM_BYTES + COUNTER_BYTES + 4 * 8,
    ),
    Case(
        "balanced_adam",
        {"masking": False, "rebalancing": True, "early_steps": 5, "rebalance_start": 5, "rebalance_end": 45},
        ADAM_BYTES,
    ),
    Case("balanced_adam", {"kept_components": 0.5, "masking": False, "decoupled": False}, ADAM_BYTES),
    Case("balanced_adam", {"beta2_of_layers": [0.9, 0.999]}, ADAM_BYTES + COUNTER_BYTES),
    Case("adafactor", {}, 4 * (12 + 5) + 2 * 4),
    Case("sgd", {}, 4 * 40, (0.02, 1.0)),
    Case("sgd", {"momentum": 0.0}, 0, (0.02, 1.0)),
    Case("nadam", {}, ADAM_BYTES + 2 * 4),
    Case("radam", {}, ADAM_BYTES, (0.03, 1.0)),
    Case("custom", {}, ADAM_BYTES),
]
every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS, ids=str)
STEPS = 60
"""Past the early phase of Balanced Adam, which ends at 50."""


class Tower(nn.Module):
    """One of all that a parameter can be: matrix, bias, 0-d, non-contiguous, used only now and then."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(5, 7)
        self.transposed = nn.Parameter(torch.randn(3, 4, generator=generator).t())
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.rare = nn.Parameter(torch.randn(2, 3, 2, generator=generator))
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(7, 5, generator=generator))
            self.layer.bias.zero_()

    def set_gradients(self, step: int) -> None:
        """The same at a step for every copy of the tower."""
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) + 0.5
            parameter.grad = drawn.to(parameter.dtype)
        if step % 3:
            self.rare.grad = None


def make(case: Case, model: nn.Module, learning_rate: float | None = None) -> Optimizer:
    rate = {} if learning_rate is None else {"learning_rate": learning_rate}
    return create_dense_optimizer(dense_optimizer_defaults(case.name, **case.options, **rate), model)


def train(model: Tower, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        model.set_gradients(step)
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_the_table_covers_every_name() -> None:
    assert {case.name for case in OPTIMIZERS} == DENSE_OPTIMIZERS.keys()


@every_optimizer
def test_same_gradients_same_bits(case: Case) -> None:
    results = []
    for _ in range(2):
        model = Tower()
        train(model, make(case, model), range(STEPS))
        results.append(weights(model))
    assert_equal(*results)
    assert all(not torch.equal(new, old) for new, old in zip(results[0], weights(Tower()), strict=True))


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saved_at", [7, 30])
def test_state_survives_save_and_load_midway(case: Case, dtype: torch.dtype, saved_at: int) -> None:
    """Through a file read without running code, into a fresh optimizer; dtypes too."""
    whole = Tower().to(dtype)
    optimizer = make(case, whole)
    train(whole, optimizer, range(saved_at))
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(whole, optimizer, range(saved_at, STEPS))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = Tower().to(dtype)
    resumed.load_state_dict(saved["model"])
    second = make(case, resumed)
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, range(saved_at, STEPS))
    assert_equal(weights(whole), weights(resumed))
    for left, right in zip(whole.parameters(), resumed.parameters(), strict=True):
        states = optimizer.state[left], second.state[right]
        assert states[0].keys() == states[1].keys()
        tensors = [[value for value in state.values() if torch.is_tensor(value)] for state in states]
        assert_equal(*tensors)


@every_optimizer
def test_a_copy_goes_its_own_way(case: Case) -> None:
    model = Tower()
    optimizer = make(case, model)
    train(model, optimizer, range(10))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(twin, twin_optimizer, range(10, STEPS))
    train(model, optimizer, range(10, STEPS))
    assert_equal(weights(model), weights(twin))


def minimize(case: Case, model: nn.Module, rate: float, loss_of: Callable[[], torch.Tensor]) -> float:
    """Loss after 300 steps, the rate falling to 0."""
    optimizer = make(case, model, rate)
    for step in range(300):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1.0 - step / 300)
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
    return loss_of().item()


@every_optimizer
def test_descends_a_badly_scaled_quadratic(case: Case) -> None:
    """Curvatures from 0.01 to 100 over a matrix, rows times columns; start at distance 1 of every optimum."""
    curvature = torch.outer(torch.logspace(-1, 1, 6), torch.logspace(-1, 1, 5))
    target = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).sign()
    model = nn.Linear(5, 6, bias=False)
    nn.init.zeros_(model.weight)

    def loss_of() -> torch.Tensor:
        return (curvature * (model.weight - target).square()).sum() / 2.0

    start = loss_of().item()
    assert minimize(case, model, case.rates[0], loss_of) < 0.01 * start


@every_optimizer
def test_reaches_the_optimum_of_a_logistic_regression(case: Case) -> None:
    """scikit-learn's solver says where it is; features differ in scale by 10."""
    random = np.random.default_rng(0)
    features = random.standard_normal((256, 4)) * [0.3, 1.0, 2.0, 3.0]
    labels = random.random(256) < 1.0 / (1.0 + np.exp(-features @ [3.0, 1.0, -0.5, 0.2] - 0.5))
    x, y = torch.as_tensor(features, dtype=torch.float32), torch.as_tensor(labels, dtype=torch.float32)
    model = nn.Linear(4, 1)

    def loss_of() -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)

    exact = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(features, labels)
    with torch.no_grad():
        model.weight.copy_(torch.as_tensor(exact.coef_))
        model.bias.copy_(torch.as_tensor(exact.intercept_))
    best = loss_of().item()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    assert minimize(case, model, case.rates[1], loss_of) <= best + 0.001


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_with_float32_inside(case: Case, dtype: torch.dtype) -> None:
    """As a float32 run whose weights are rounded after every step; gradients are handed back as they came."""
    half = Tower().to(dtype)
    full = Tower().to(dtype).float()
    optimizers = make(case, half), make(case, full)
    for step in range(STEPS):
        half.set_gradients(step)
        gradients = [parameter.grad for parameter in half.parameters()]
        for narrow, wide in zip(half.parameters(), full.parameters(), strict=True):
            wide.grad = None if narrow.grad is None else narrow.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        assert all(p.grad is gradient for p, gradient in zip(half.parameters(), gradients, strict=True))
        with torch.no_grad():
            for parameter in full.parameters():
                parameter.copy_(parameter.to(dtype))
    assert_equal(weights(half), [weight.to(dtype) for weight in weights(full)])
    for parameter in half.parameters():
        for name, value in optimizers[0].state[parameter].items():
            short = case.options.get("bfloat16_momentum", False) and name == "momentum"
            if torch.is_tensor(value) and value.is_floating_point():
                assert value.dtype == (torch.bfloat16 if short else torch.float32), name


@every_optimizer
def test_layout_does_not_matter(case: Case) -> None:
    """A transposed view steps as its contiguous copy; a 0-d parameter as one of shape [1]."""
    matrix = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    pairs = [(matrix.clone(), matrix.t().contiguous().t()), (torch.tensor([0.5]), torch.tensor(0.5))]
    plain, strange = (nn.ParameterList([nn.Parameter(pair[side]) for pair in pairs]) for side in (0, 1))
    assert not strange[0].is_contiguous()
    assert strange[1].dim() == 0
    for model in (plain, strange):
        optimizer = make(case, model)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            for parameter in model:
                drawn = torch.randn(parameter.shape or (1,), generator=generator) + 0.5
                parameter.grad = drawn.reshape(parameter.shape)
            optimizer.step()
    # Sums run in another order, and principal components are found by iteration.
    tolerance = 1e-3 if "kept_components" in case.options else 1e-5
    for left, right in zip(plain, strange, strict=True):
        torch.testing.assert_close(left.reshape(right.shape), right, rtol=tolerance, atol=tolerance)


@every_optimizer
def test_groups_have_their_own_learning_rates(case: Case) -> None:
    model = nn.ModuleDict({"fast": nn.Linear(3, 3), "still": nn.Linear(3, 3)})
    optimizer = make(case, model["fast"])
    optimizer.add_param_group(
        {"params": [(f"still.{n}", p) for n, p in model["still"].named_parameters()], "lr": 0.0}
    )
    before = weights(model["still"]), weights(model["fast"])
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    assert_equal(before[0], weights(model["still"]))
    assert all(not torch.equal(a, b) for a, b in zip(before[1], weights(model["fast"]), strict=True))


@every_optimizer
def test_zero_gradients_move_nothing_and_none_makes_no_state(case: Case) -> None:
    model = Tower()
    config = dense_optimizer_defaults(case.name, **{**case.options, **_without_decay(case)})
    optimizer = create_dense_optimizer(config, model)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model.rare.grad = None
        optimizer.step()
    assert_equal(weights(model), weights(Tower()))
    assert not optimizer.state.get(model.rare)


@every_optimizer
def test_bytes_of_state(case: Case) -> None:
    model = nn.Linear(5, 7)
    model.bias = nn.Parameter(torch.zeros(5))
    optimizer = make(case, model)
    assert optimizer_state_bytes(optimizer) == 0
    model.weight.grad, model.bias.grad = torch.ones(7, 5), torch.ones(5)
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == case.state_bytes


@every_optimizer
def test_sparse_gradients_are_refused_with_a_word(case: Case) -> None:
    """torch's SGD alone takes them; then the row moves that was touched."""
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = make(case, embedding)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    if case.name == "sgd":
        optimizer.step()
        assert (embedding.weight != before).any(1).tolist() == [False, True, False, False]
        return
    with pytest.raises(RuntimeError, match=r"(?s)sparse"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


@every_optimizer
def test_closure_is_called_with_gradients_on_and_its_loss_returned(case: Case) -> None:
    model = nn.Linear(3, 1)
    optimizer = make(case, model)
    before = weights(model)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        expected = model(torch.ones(2, 3)).sum().item()
    assert optimizer.step(closure) == expected
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def _without_decay(case: Case) -> dict[str, Any]:
    return {} if case.name == "custom" else {"weight_decay": 0.0}
