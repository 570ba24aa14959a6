"""Groups by options."""

from __future__ import annotations

import torch
from torch import nn

from recsys_basis.dense_optimizers.parameter_groups import group_parameters, matches


def test_equal_options_share_a_group_in_order_of_appearance() -> None:
    named = [(name, nn.Parameter(torch.ones(1))) for name in ("a", "b", "c", "d")]
    named[3][1].requires_grad_(False)
    groups = group_parameters(named, lambda name, _: {"lr": 2.0} if name == "b" else {})
    assert groups == [{"params": [named[0], named[2]]}, {"params": [named[1]], "lr": 2.0}]


def test_globs() -> None:
    assert matches("over.0.bias", ["*bias"])
    assert matches("layer_norm.weight", ["*bias", "*norm*"])
    assert not matches("over.0.weight", ["*bias", "*norm*"])
    assert not matches("LayerNorm.weight", ["*norm*"])
    assert not matches("bias", [])
