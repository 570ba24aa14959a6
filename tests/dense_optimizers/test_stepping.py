"""Parts that all steps share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recsys_basis.dense_optimizers import SM3, BalancedAdam
from recsys_basis.dense_optimizers.stepping import (
    bias_corrections,
    decay_weights,
    float32_parameters,
    subtract,
    with_float32_state,
)


def test_parameters_are_float32_inside_and_rounded_into_the_same_memory_after() -> None:
    half = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    silent = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    full = nn.Parameter(torch.ones(2))
    half.grad = gradient = torch.ones(2, dtype=torch.bfloat16)
    memory, full_memory = half.data_ptr(), full.data_ptr()
    with float32_parameters([{"params": [half, silent]}, {"params": [full]}]):
        assert half.dtype == half.grad.dtype == torch.float32
        assert silent.dtype == torch.bfloat16
        assert full.data_ptr() == full_memory
        with torch.no_grad():
            half += 1e-4  # lost in rounding
            half[1] += 1.0
    assert half.dtype == torch.bfloat16
    assert half.data_ptr() == memory
    assert half.tolist() == [1.0, 3.0]
    assert half.grad is gradient


def test_a_failing_step_leaves_the_parameters_as_they_were_typed() -> None:
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    half.grad = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="inside"), float32_parameters([{"params": [half]}]):
        raise RuntimeError("inside")
    assert half.dtype == half.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("optimizer_type", [SM3, BalancedAdam, with_float32_state(torch.optim.SGD)])
@pytest.mark.parametrize("named", [False, True])
def test_refusal_names_the_parameter(optimizer_type: type[torch.optim.Optimizer], named: bool) -> None:
    table = nn.Embedding(3, 2, sparse=True)
    parameters = table.named_parameters() if named else table.parameters()
    optimizer = optimizer_type(parameters, lr=0.1)
    table(torch.tensor([0])).sum().backward()
    name = "weight" if named else "0 of group 0"
    with pytest.raises(
        RuntimeError, match=f"{optimizer_type.__name__} takes dense .* parameter {name} is sparse"
    ):
        optimizer.step()


@pytest.mark.parametrize("optimizer_type", [SM3, BalancedAdam])
def test_complex_parameters_are_refused(optimizer_type: type[torch.optim.Optimizer]) -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="is complex"):
        optimizer_type([parameter], lr=0.1).step()


def test_float32_state_keeps_the_name_and_the_kind() -> None:
    made = with_float32_state(torch.optim.RAdam)
    assert made.__name__ == "RAdam"
    assert issubclass(made, torch.optim.RAdam)


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)], ids=["float", "tensor"])
def test_write_to_weights(rate: float | torch.Tensor) -> None:
    weights, updates = [torch.tensor([4.0, 8.0])], [torch.tensor([1.0, -1.0])]
    decay_weights(weights, rate, 0.0)
    decay_weights(weights, rate, 2.0)
    subtract(weights, updates, rate)
    assert weights[0].tolist() == [1.75, 4.25]
    assert updates[0].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("time", [1, 2, 1000, 10**6])
@pytest.mark.parametrize("compiling", [False, True])
def test_bias_correction_keeps_its_digits(
    monkeypatch: pytest.MonkeyPatch, beta: float, time: int, compiling: bool
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    corrected = bias_corrections(beta, [torch.tensor(float(time))])[0]
    assert torch.is_tensor(corrected) == compiling
    exact = 1.0 if beta == 0.0 else -math.expm1(time * math.log(beta))
    assert float(corrected) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("optimizer_type", [SM3, BalancedAdam])
def test_a_tensor_learning_rate_acts_as_its_current_value(
    optimizer_type: type[torch.optim.Optimizer],
) -> None:
    rate = torch.tensor(0.0)
    by_tensor, by_float = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    optimizers = optimizer_type([by_tensor], lr=rate), optimizer_type([by_float], lr=0.0)
    for step in range(60):
        rate.fill_(0.1 / (1 + step))
        optimizers[1].param_groups[0]["lr"] = 0.1 / (1 + step)
        drawn = torch.randn(3, 2, generator=torch.Generator().manual_seed(step))
        for parameter, optimizer in zip((by_tensor, by_float), optimizers, strict=True):
            parameter.grad = drawn.clone()
            optimizer.step()
    torch.testing.assert_close(by_tensor, by_float, rtol=1e-5, atol=1e-6)
    assert not torch.equal(by_tensor, torch.ones(3, 2))


def test_no_step_reads_a_number_from_a_gpu() -> None:
    """Fake tensors raise where the host asks for one; all phases of Balanced Adam, rates as tensors."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.ones(shape, device="cuda")) for shape in ((3, 2), (3,), ())]
        phases: dict[str, Any] = {"early_steps": 3, "mask_steps": 2, "groups": "cluster"}
        phases |= {"rebalancing": True, "rebalance_start": 4, "rebalance_end": 8, "rebalance_window": 2}
        optimizer = BalancedAdam(parameters, capturable=True, foreach=True, **phases)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="cuda")
        for _ in range(10):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()


def test_no_step_of_sm3_reads_a_number() -> None:
    parameters = [nn.Parameter(torch.ones(shape, device="meta")) for shape in ((3, 2), (3,), ())]
    optimizer = SM3(parameters, beta2=0.9, momentum=0.9, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.mark.parametrize(
    ("optimizer_type", "options", "steps_before"),
    [
        (SM3, {"momentum": 0.9, "beta2": 0.99, "weight_decay": 0.1}, 1),
        (BalancedAdam, {"foreach": True, "groups": "cluster"}, 1),
        (BalancedAdam, {"foreach": True, "early_steps": 2}, 2),
    ],
)
def test_compiles_without_a_graph_break(
    optimizer_type: type[torch.optim.Optimizer], options: dict[str, object], steps_before: int
) -> None:
    torch._dynamo.reset()
    compiled, plain = (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)) for _ in range(2))
    plain.load_state_dict(compiled.state_dict())
    optimizers = [optimizer_type(model.parameters(), **options) for model in (compiled, plain)]
    fast = torch.compile(optimizers[0].step, backend="eager", fullgraph=True)
    for step in range(steps_before + 3):
        for model, take in (
            (compiled, fast if step >= steps_before else optimizers[0].step),
            (plain, optimizers[1].step),
        ):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            take()
    for left, right in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()
