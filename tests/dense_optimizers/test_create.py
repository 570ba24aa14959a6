"""From section to optimizer: classes, arguments, groups, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recsys_basis.config import compose_job
from recsys_basis.dense_optimizers import (
    SM3,
    BalancedAdam,
    create_dense_optimizer,
    dense_optimizer_defaults,
    parse_dense_optimizer,
)
from recsys_basis.schema import ConfigError

TYPES = {
    "adamw": torch.optim.AdamW,
    "sm3": SM3,
    "balanced_adam": BalancedAdam,
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "custom": torch.optim.Adamax,
}


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1))


@pytest.mark.parametrize("name", sorted(TYPES))
def test_class_and_rate(name: str) -> None:
    optimizer = create_dense_optimizer(dense_optimizer_defaults(name, learning_rate=0.25), tower())
    assert type(optimizer) is TYPES[name]
    for group in optimizer.param_groups:
        assert group["lr"] == 0.25
        assert group.get("foreach", True) or name == "custom"


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("adamw", {"beta1": 0.8, "eps": 1e-6}, {"betas": (0.8, 0.999), "eps": 1e-6, "foreach": True}),
        ("sgd", {"nesterov": True}, {"momentum": 0.9, "nesterov": True, "dampening": 0}),
        ("nadam", {"momentum_decay": 0.1}, {"momentum_decay": 0.1, "decoupled_weight_decay": True}),
        (
            "radam",
            {"decoupled": False, "beta2": 0.99},
            {"decoupled_weight_decay": False, "betas": (0.9, 0.99)},
        ),
        (
            "adafactor",
            {"clip_threshold": 2.0, "eps1": 1e-9},
            {"d": 2.0, "eps": (1e-9, 1e-3), "beta2_decay": -0.8},
        ),
        ("sm3", {"variant": "I", "beta2": 0.9}, {"variant": "I", "beta2": 0.9, "momentum": 0.9}),
        (
            "balanced_adam",
            {"early_steps": 7},
            {"early_steps": 7, "decoupled_weight_decay": True, "groups": "module"},
        ),
        ("custom", {"arguments": {"betas": [0.5, 0.6]}}, {"betas": [0.5, 0.6]}),
    ],
)
def test_arguments_arrive(name: str, overrides: dict[str, Any], expected: dict[str, Any]) -> None:
    optimizer = create_dense_optimizer(dense_optimizer_defaults(name, **overrides), nn.Linear(2, 2))
    for group in optimizer.param_groups:
        assert {key: group[key] for key in expected} == expected


@pytest.mark.parametrize("name", sorted(TYPES))
def test_no_decay_by_glob(name: str) -> None:
    decay = {"arguments": {"weight_decay": 0.1}} if name == "custom" else {"weight_decay": 0.1}
    config = dense_optimizer_defaults(name, **decay, no_decay=["*.bias", "1.*"])
    optimizer = create_dense_optimizer(config, tower())
    decays = {n: group["weight_decay"] for group in optimizer.param_groups for n in group["param_names"]}
    assert decays == {
        "0.weight": 0.1,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.1,
        "2.bias": 0.0,
    }


def test_without_decay_there_is_one_group() -> None:
    optimizer = create_dense_optimizer(dense_optimizer_defaults("adamw"), tower())
    assert len(optimizer.param_groups) == 1


def test_balanced_groups_of_the_config() -> None:
    scales = dense_optimizer_defaults("balanced_adam").group_scales.model_dump() | {"linear_mlp": 3.0}
    config = dense_optimizer_defaults(
        "balanced_adam", group_scales=scales, beta2_of_layers=[0.9, 0.99], projection_names=["2.*"]
    )
    optimizer = create_dense_optimizer(config, tower())
    found = {n: group for group in optimizer.param_groups for n in group["param_names"]}
    assert {n: group["group_scale"] for n, group in found.items()} == {
        "0.weight": 3.0,
        "0.bias": 0.4,
        "1.weight": 0.6,
        "1.bias": 0.4,
        "2.weight": 0.8,
        "2.bias": 0.4,
    }
    assert found["0.weight"]["betas"] == (0.9, pytest.approx(0.9))
    assert found["2.bias"]["betas"] == (0.9, pytest.approx(0.99))


@pytest.mark.parametrize("name", sorted(TYPES))
def test_only_the_named_parameters_that_need_a_gradient(name: str) -> None:
    model = tower()
    model[2].bias.requires_grad_(False)
    named = [("out." + key, parameter) for key, parameter in model[2].named_parameters()]
    optimizer = create_dense_optimizer(dense_optimizer_defaults(name), model, named)
    assert [group["param_names"] for group in optimizer.param_groups] == [["out.weight"]]


def test_pairs_instead_of_a_module() -> None:
    pairs = list(tower().named_parameters())
    optimizer = create_dense_optimizer(dense_optimizer_defaults("sm3"), pairs)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in pairs]
    with pytest.raises(ConfigError, match="pass the model to create_dense_optimizer"):
        create_dense_optimizer(dense_optimizer_defaults("balanced_adam"), pairs)


def test_nothing_to_train_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="the model has no dense parameter that needs a gradient"):
        create_dense_optimizer(dense_optimizer_defaults("adamw"), model)


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("Adam", {}, "must be package.module.Class"),
        ("no_such_package.Lion", {}, "cannot import no_such_package: .*install its package"),
        ("torch.optim.Lion", {}, "torch.optim has no Lion"),
        ("torch.nn.Linear", {}, "is not a subclass of torch.optim.Optimizer"),
        ("torch.optim.lr_scheduler.StepLR", {}, "is not a subclass"),
        (
            "torch.optim.Adamax",
            {"beta": 1},
            "Adamax.* refused its arguments: .*unexpected keyword argument 'beta'",
        ),
        ("torch.optim.Adamax", {"eps": -1.0}, "refused its arguments: Invalid epsilon"),
        ("torch.optim.LBFGS", {}, "its step needs a closure"),
    ],
)
def test_custom_refusals(target: str, arguments: dict[str, Any], message: str) -> None:
    config = dense_optimizer_defaults("custom", target=target, arguments=arguments)
    with pytest.raises(ConfigError, match=message):
        create_dense_optimizer(config, tower())


LION = '''
import torch

class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675), Algorithm 2."""

    def __init__(self, params, lr, betas, weight_decay=0.5):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * momentum.lerp(weight.grad, 1 - beta1).sign())
                momentum.lerp_(weight.grad, 1 - beta2)
'''


@pytest.fixture
def lion_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_lion.py").write_text(LION)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("given", "decay"), [("", 0.5), (", weight_decay: 0.25", 0.25)])
def test_custom_of_a_file_of_ones_own_from_the_command_line(
    lion_file: None, given: str, decay: float
) -> None:
    """Its first step is lr times the gradient's sign; the class's own decay spares no_decay, too."""
    words = ["dense_optimizer=custom", "dense_optimizer.target=my_lion.Lion"]
    arguments = f"dense_optimizer.arguments={{betas: [0.9, 0.99]{given}}}"
    words += ["~dense_optimizer.arguments", f"+{arguments}", "dense_optimizer.learning_rate=0.01"]
    config = parse_dense_optimizer(compose_job("train", words)["dense_optimizer"])
    model = nn.Linear(2, 1)
    optimizer = create_dense_optimizer(config, model)
    assert type(optimizer).__name__ == "Lion"
    decays = {
        name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]
    }
    assert decays == {"weight": decay, "bias": 0.0}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = -torch.ones_like(parameter)
    optimizer.step()
    expected = [before[0] * (1.0 - 0.01 * decay) + 0.01, before[1] + 0.01]
    torch.testing.assert_close(list(model.parameters()), expected)


def test_custom_without_a_needed_argument(lion_file: None) -> None:
    config = dense_optimizer_defaults("custom", target="my_lion.Lion", arguments={})
    with pytest.raises(ConfigError, match=r"Lion\(.*missing 1 required positional argument: 'betas'"):
        create_dense_optimizer(config, tower())
