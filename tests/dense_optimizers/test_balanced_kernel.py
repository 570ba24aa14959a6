"""Balanced Adam in C++ against the same in plain PyTorch, and where it is refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from recsys_basis.dense_optimizers import BalancedAdam, balanced_kernel
from recsys_basis.dense_optimizers.balanced_kernel import describe_choice, uses_cpp

STEPS = 45
PHASES: dict[str, Any] = {
    "early_steps": 22,
    "rebalancing": True,
    "rebalance_start": 24,
    "rebalance_end": 44,
    "rebalance_window": 5,
    "rebalance_flips": 2,
}
"""Masks to step 20, then scales alone, Adam, rebalancing from its first window on, Adam."""


pytestmark = pytest.mark.usefixtures("kernels_on_any_threads")


def model() -> nn.ParameterList:
    """Rows longer than one piece of a sum, fan-in 1, more axes, a bias, one number."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2100), (6, 1), (5, 3, 2), (9,), ())
    return nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)


def set_gradients(parameters: nn.ParameterList, step: int) -> None:
    """Channels of different spread around a mean of their own; some entries have none, some turn steady."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator) + 0.7
        gradient *= torch.rand(parameter.shape, generator=generator) < 0.8
        if parameter.dim() > 1:
            gradient *= torch.logspace(-1.0, 1.0, len(parameter)).view(-1, *[1] * (parameter.dim() - 1))
        parameter.grad = gradient


def make(parameters: nn.ParameterList, kernel: str, **options: Any) -> BalancedAdam:
    """The last matrix is an embedding, so without channels."""
    groups = [
        {"params": list(parameters[:2]), "kind": "linear_mlp", "group_scale": 1.2},
        {"params": [parameters[2]], "kind": "embedding"},
        {"params": list(parameters[3:]), "kind": "bias", "group_scale": 0.4},
    ]
    return BalancedAdam(groups, **{"lr": 0.01, **PHASES, **options}, kernel=kernel)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"masked_entry": "hold"},
        {"mask_threshold": 0.0, "mask_flips": 0},
        {"groups": "cluster"},
        {"groups": "cluster", "statistics": "freeze", "scale_limit": 1.5},
        {"dimension_scaling": False, "eps": 0.1},
        {"amsgrad": True, "maximize": True, "weight_decay": 0.1, "decoupled": True},
        {"kept_components": 0.5},
        {"lr": torch.tensor(0.01)},
    ],
    ids=str,
)
def test_cpp_is_pytorch_up_to_rounding_in_every_step(options: dict[str, Any]) -> None:
    """State to the bit: it is Adam's and the counters, neither of which reads a weight."""
    models = model(), model()
    optimizers = make(models[0], "cpp", **options), make(models[1], "torch", **options)
    for step in range(STEPS):
        for parameters, optimizer in zip(models, optimizers, strict=True):
            set_gradients(parameters, step)
            optimizer.step()
        for ours, truth in zip(*models, strict=True):
            torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)
            states = optimizers[0].state[ours], optimizers[1].state[truth]
            assert states[0].keys() == states[1].keys()
            for name, value in states[0].items():
                if name == "measured_scale":
                    torch.testing.assert_close(value, states[1][name], rtol=1e-5, atol=0.0)
                else:
                    assert value.dtype == states[1][name].dtype
                    assert torch.equal(value, states[1][name]), (step, name)


def test_threads_do_not_change_a_bit() -> None:
    """Above the size from which torch's own loops use them, too."""
    weights = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        parameter = nn.Parameter(torch.ones(300, 301))
        optimizer = BalancedAdam([{"params": [parameter], "kind": "linear_mlp"}], lr=0.01, kernel="cpp")
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(parameter.shape, generator=generator).exp()
            optimizer.step()
        weights.append(parameter.detach())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("kernels", [("cpp", "torch"), ("torch", "cpp")], ids=str)
@pytest.mark.parametrize("saved_at", [7, 36], ids=["masks", "rebalancing"])
def test_a_checkpoint_of_one_goes_on_with_the_other(kernels: tuple[str, str], saved_at: int) -> None:
    whole = model()
    optimizer = make(whole, kernels[0], statistics="freeze")
    for step in range(STEPS):
        if step == saved_at:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            resumed = copy.deepcopy(whole)
        set_gradients(whole, step)
        optimizer.step()
    file.seek(0)
    second = make(resumed, kernels[1], statistics="freeze")
    second.load_state_dict(torch.load(file, weights_only=True))
    assert {group["kernel"] for group in second.param_groups} == {kernels[1]}
    for step in range(saved_at, STEPS):
        set_gradients(resumed, step)
        second.step()
    for left, right in zip(whole, resumed, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [1, 21, 30], ids=["masks", "scales", "rebalancing"])
@pytest.mark.parametrize("kernel", ["cpp", "torch"])
def test_a_gradient_that_is_no_number_is_seen(kernel: str, step: int) -> None:
    parameters = model()
    optimizer = make(parameters, kernel)
    for count in range(1, step + 1):
        set_gradients(parameters, count)
        if count == step:
            parameters[0].grad[1, 5] = float("nan")
        optimizer.step()
    assert parameters[0][1, 5].isnan()
    assert not parameters[1].isnan().any()


@pytest.mark.parametrize("kernel", ["cpp", "torch"])
def test_a_graph_from_before_the_step_is_refused_by_backward(kernel: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    loss = parameter.square().sum()
    parameter.grad = torch.ones(3)
    BalancedAdam([parameter], kernel=kernel).step()  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Wrapped(torch.Tensor):
    """Like DTensor, not plain memory."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(3, 2).t(),
        torch.ones(2, 3, device="meta"),
        torch.ones(2, 3).as_subclass(Wrapped),
    ],
    ids=["float64", "transposed", "device", "subclass"],
)
def test_cpp_is_refused_with_the_reason_and_auto_takes_pytorch(tensor: torch.Tensor) -> None:
    assert uses_cpp("auto", torch.ones(2, 3), torch.ones(2, 3))
    assert not uses_cpp("torch", torch.ones(2, 3))
    assert not uses_cpp("auto", torch.ones(2, 3), tensor)
    with pytest.raises(RuntimeError, match=r"kernel='cpp'.*contiguous float32 .* a CPU, not .*stride"):
        uses_cpp("cpp", torch.ones(2, 3), tensor)


def test_tensors_of_another_shape_are_pytorchs_to_refuse() -> None:
    assert not uses_cpp("auto", torch.ones(2, 3), torch.ones(2, 2))


@pytest.mark.parametrize("missing", ["extension", "compiling"])
def test_cpp_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "extension":
        monkeypatch.setattr(balanced_kernel, "missing_reason", lambda: "the compiled kernels do not load")
    else:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not uses_cpp("auto", torch.ones(2))
    with pytest.raises(RuntimeError, match=r"kernel='cpp'\): .*(do not load|torch.compile)"):
        uses_cpp("cpp", torch.ones(2))


def test_auto_says_what_it_takes_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    towers = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))]
    assert describe_choice(towers).startswith("dense_optimizer.kernel = auto: the C++ kernels (")
    others = [*towers, torch.nn.Parameter(torch.ones(2, 3, device="meta"))]
    words = describe_choice(others)
    assert "auto: plain PyTorch for 1 of 3 parameters, since the C++ kernels" in words and "meta" in words
    monkeypatch.setattr(balanced_kernel, "missing_reason", lambda: "they do not load")
    assert describe_choice(towers).endswith("plain PyTorch for 2 of 2 parameters, since they do not load")
