"""Kinds of parameters by their modules, depth by their order, and the groups made of both."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.mlp import MLP

from recsys_basis.dense_optimizers import GROUP_SCALES, balanced_adam_groups
from recsys_basis.dense_optimizers.balanced_groups import layer_beta2, parameter_kinds


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bags = nn.EmbeddingBag(5, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.proj_in = nn.Linear(4, 4)
        self.mlp = MLP(4, [4, 3])
        self.cross = LowRankCrossNet(4, 2, low_rank=2)
        self.normal = nn.LayerNorm(4)
        self.batch = nn.BatchNorm1d(4)
        self.temperature = nn.Parameter(torch.ones(()))


def test_kind_of_every_parameter() -> None:
    model = Zoo()
    kinds = parameter_kinds(model)
    named = {name: kinds[parameter] for name, parameter in model.named_parameters()}
    assert named == {
        "conv.weight": "conv",
        "conv.bias": "bias",
        "bags.weight": "embedding",
        "attention.in_proj_weight": "linear_projection",
        "attention.in_proj_bias": "bias",
        "attention.out_proj.weight": "linear_projection",
        "attention.out_proj.bias": "bias",
        "proj_in.weight": "linear_projection",
        "proj_in.bias": "bias",
        "mlp._mlp.0._linear.weight": "linear_mlp",
        "mlp._mlp.0._linear.bias": "bias",
        "mlp._mlp.1._linear.weight": "linear_mlp",
        "mlp._mlp.1._linear.bias": "bias",
        "cross.W_kernels.0": "linear_projection",
        "cross.W_kernels.1": "linear_projection",
        "cross.V_kernels.0": "linear_projection",
        "cross.V_kernels.1": "linear_projection",
        "cross.bias.0": "bias",
        "cross.bias.1": "bias",
        "normal.weight": "norm",
        "normal.bias": "bias",
        "batch.weight": "norm",
        "batch.bias": "bias",
        "temperature": "other",
    }
    assert set(named.values()) == GROUP_SCALES.keys()


def test_default_scales_are_the_designs() -> None:
    assert dict(GROUP_SCALES) == {
        "conv": 1.0,
        "linear_projection": 0.8,
        "linear_mlp": 1.2,
        "norm": 0.6,
        "embedding": 1.0,
        "bias": 0.4,
        "other": 1.0,
    }


def test_groups_hold_every_trained_parameter_once_with_the_scale_of_its_kind() -> None:
    model = Zoo()
    model.conv.weight.requires_grad_(False)
    groups = balanced_adam_groups(model)
    names = [name for group in groups for name, _ in group["params"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters() if name != "conv.weight")
    kinds = parameter_kinds(model)
    for group in groups:
        assert group["group_scale"] == GROUP_SCALES[group["kind"]]
        assert {kinds[parameter] for _, parameter in group["params"]} == {group["kind"]}


def test_nothing_is_attached_to_parameters() -> None:
    model = Zoo()
    before = {name: set(vars(parameter)) for name, parameter in model.named_parameters()}
    balanced_adam_groups(model, layer_betas=(0.9, 0.99, 0.9999))
    assert {name: set(vars(parameter)) for name, parameter in model.named_parameters()} == before


def test_names_may_differ_from_the_modules_own() -> None:
    """Sharded models report other names than their modules have; identity decides."""
    model = nn.Sequential(nn.Linear(2, 2))
    groups = balanced_adam_groups(model, named_parameters=[("tower.weight", model[0].weight)])
    assert [(group["kind"], group["params"]) for group in groups] == [
        ("linear_mlp", [("tower.weight", model[0].weight)])
    ]


def test_no_decay_by_name() -> None:
    groups = balanced_adam_groups(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), no_decay=["1.*"])
    decays = {name: group.get("weight_decay") for group in groups for name, _ in group["params"]}
    assert decays == {"0.weight": None, "0.bias": None, "1.weight": 0.0, "1.bias": 0.0}


def test_beta2_rises_by_depth_with_horizons_in_equal_ratios() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    beta2 = layer_beta2(model)
    assert [beta2[model[index].weight] for index in (0, 2, 3)] == pytest.approx([0.99, 0.999, 0.9999])
    assert beta2[model[2].bias] == beta2[model[2].weight]
    groups = balanced_adam_groups(model, layer_betas=(0.8, 0.99, 0.9999))
    betas = {name: group["betas"] for group in groups for name, _ in group["params"]}
    assert betas["0.weight"] == betas["0.bias"] == (0.8, pytest.approx(0.99))
    assert betas["3.weight"] == (0.8, pytest.approx(0.9999))


def test_beta2_of_a_single_layer_is_the_first() -> None:
    model = nn.Linear(2, 2)
    assert layer_beta2(model)[model.weight] == pytest.approx(0.99)


def test_no_parameters_are_not_all_parameters() -> None:
    assert balanced_adam_groups(nn.Linear(2, 2), named_parameters=[]) == []


def test_refusals() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="must name each of"):
        balanced_adam_groups(model, scales={"bias": 1.0})
    with pytest.raises(ValueError, match="parameter stray is not part of the model"):
        balanced_adam_groups(model, named_parameters=[("stray", nn.Parameter(torch.ones(1)))])
