"""Balanced Adam against a float64 loop over entries, and torch's Adam before, beside and after its phases."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels import require_kernels
from torch import nn

from recsys_basis.dense_optimizers import BalancedAdam, balanced_adam_groups
from recsys_basis.schema import ConfigError

OFF: dict[str, Any] = {"group_scaling": False, "dimension_scaling": False, "masking": False}
SHAPE = (4, 6)
LR, BETA1, BETA2, EPS = 0.01, 0.9, 0.99, 1e-8


def gradients_of(steps: int, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Iterator[np.ndarray]:
    """Channels of different spread; entries keep their sign, flip it, or now and then have no gradient."""
    random = np.random.default_rng(seed)
    spread = np.logspace(-1.0, 1.0, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    steady = random.standard_normal(shape)
    for _ in range(steps):
        yield spread * (steady + random.standard_normal(shape)) * (random.random(shape) < 0.8)


class Loop:
    """One [C, n] weight from the formulas of the module, entry by entry, all parts on."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {
            "group_scale": 1.2,
            "limit": 4.0,
            "statistics": "refresh",
            "entry": "floor",
        } | settings
        self.weights, self.first, self.second = (np.full(SHAPE, value) for value in (1.0, 0.0, 0.0))
        self.flips, self.last = np.zeros(SHAPE, dtype=int), np.zeros(SHAPE)
        self.step = 0
        self.scale: np.ndarray | None = None

    def update(self, gradient: np.ndarray) -> None:
        self.step += 1
        self.first = BETA1 * self.first + (1.0 - BETA1) * gradient
        self.second = BETA2 * self.second + (1.0 - BETA2) * gradient**2
        self.count(gradient)
        if self.scale is None or self.settings["statistics"] == "refresh":
            self.scale = self.channel_scale(gradient)
        mean = self.second.mean()
        for i in np.ndindex(SHAPE):
            first, second = self.first[i], self.second[i]
            if self.step <= 20:
                if second < 0.3 * mean:
                    first, second = (
                        (first, 0.3 * mean) if self.settings["entry"] == "floor" else (0.0, second)
                    )
                if self.flips[i] > 3:
                    first = 0.0
            scaled = second * self.settings["group_scale"] * self.scale[i[0]]
            root = math.sqrt(scaled / (1.0 - BETA2**self.step))
            self.weights[i] -= LR * first / (1.0 - BETA1**self.step) / (root + EPS)

    def count(self, gradient: np.ndarray) -> None:
        for i in np.ndindex(SHAPE):
            if gradient[i] != 0.0:
                if self.last[i] != 0.0 and np.sign(gradient[i]) != self.last[i]:
                    self.flips[i] += 1
                self.last[i] = np.sign(gradient[i])

    def channel_scale(self, gradient: np.ndarray) -> np.ndarray:
        deviations = [math.sqrt(((row - row.mean()) ** 2).mean()) for row in gradient]
        mean = sum(deviations) / len(deviations)
        limit = self.settings["limit"]
        return np.array([min(max(deviation / mean, 1.0 / limit), limit) for deviation in deviations])


def make(parameter: nn.Parameter, **options: Any) -> BalancedAdam:
    group = {"params": [parameter], "kind": "linear_mlp", "group_scale": 1.2}
    return BalancedAdam([group], lr=LR, betas=(BETA1, BETA2), eps=EPS, **options)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({"statistics": "freeze"}, {"statistics": "freeze"}),
        ({"masked_entry": "hold"}, {"entry": "hold"}),
        ({"scale_limit": 1.5}, {"limit": 1.5}),
        ({"group_scaling": False}, {"group_scale": 1.0}),
        ({"dimension_scaling": False}, {"limit": 1.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["torch", "cpp"])
def test_early_phase_as_the_loop_over_entries(
    options: dict[str, Any], settings: dict[str, Any], kernel: str
) -> None:
    """Also shows that scales do not compound: 50 of them would be 1.2^50 here. C++ is float32."""
    if kernel == "cpp":
        require_kernels()
    dtype, tolerance = (torch.float64, 1e-9) if kernel == "torch" else (torch.float32, 1e-5)
    loop = Loop(**settings)
    parameter = nn.Parameter(torch.ones(SHAPE, dtype=dtype))
    optimizer = make(parameter, **options, kernel=kernel)
    for gradient in gradients_of(50):
        loop.update(gradient)
        parameter.grad = torch.as_tensor(gradient, dtype=dtype)
        optimizer.step()
        found, expected = parameter.detach().double(), torch.as_tensor(loop.weights)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 100.0)
    assert torch.equal(optimizer.state[parameter]["step"], torch.tensor(50.0))


@pytest.mark.parametrize("early_steps", [1, 50])
@pytest.mark.parametrize("scale", [0.4, 1.2])
def test_a_scale_is_applied_once_however_many_steps(early_steps: int, scale: float) -> None:
    """With a constant gradient Adam steps by lr; scaled by c, by lr / sqrt(c), the 50th step as the first."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    group = {"params": [parameter], "group_scale": scale}
    optimizer = BalancedAdam([group], lr=LR, eps=0.0, early_steps=early_steps, masking=False)
    moved = []
    for _ in range(50):
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([2.0, -2.0, 2.0], dtype=torch.float64)
        optimizer.step()
        moved.append((before - parameter.detach())[0].item())
    assert moved[0] == pytest.approx(LR / math.sqrt(scale), rel=1e-5)
    assert moved[-1] == pytest.approx(LR / math.sqrt(scale) if early_steps == 50 else LR, rel=1e-5)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled": True}, {"amsgrad": True}],
    ids=str,
)
def test_stored_state_is_adams_bit_for_bit_in_the_early_phase(options: dict[str, Any], foreach: bool) -> None:
    """M, V and step are Adam's own, so bias correction is right. Weights, which weight decay puts into the
    gradient, are set equal before every step."""
    ours = nn.Parameter(torch.ones(SHAPE))
    theirs = nn.Parameter(torch.ones(SHAPE))
    balanced = make(ours, **options, foreach=foreach)
    adam = torch.optim.Adam(
        [theirs],
        lr=LR,
        betas=(BETA1, BETA2),
        weight_decay=options.get("weight_decay", 0.0),
        decoupled_weight_decay=options.get("decoupled", False),
        amsgrad=options.get("amsgrad", False),
        foreach=foreach,
    )
    for gradient in gradients_of(30):
        with torch.no_grad():
            ours.copy_(theirs)
        for parameter, optimizer in ((ours, balanced), (theirs, adam)):
            parameter.grad = torch.as_tensor(gradient, dtype=torch.float32)
            optimizer.step()
        for name, value in adam.state[theirs].items():
            assert torch.equal(balanced.state[ours][name], value), name
        assert not torch.equal(ours, theirs)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"groups": "cluster", "statistics": "freeze"}, {"amsgrad": True, "maximize": True}],
    ids=str,
)
@pytest.mark.parametrize("decoupled", [False, True])
def test_is_adam_continued_after_the_early_phase(
    options: dict[str, Any], foreach: bool, decoupled: bool
) -> None:
    """torch's Adam, given weights and state after the phase, goes on with the same bits."""
    parameter = nn.Parameter(torch.ones(SHAPE))
    options = options | {"weight_decay": 0.1}
    balanced = make(parameter, **options, decoupled=decoupled, foreach=foreach, early_steps=25)
    drawn = list(gradients_of(60))
    for gradient in drawn[:25]:
        parameter.grad = torch.as_tensor(gradient, dtype=torch.float32)
        balanced.step()
    adams = {"step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])}
    assert balanced.state[parameter].keys() == adams  # counters and scales are gone

    continued = nn.Parameter(parameter.detach().clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    kept = {key: value for key, value in options.items() if key not in ("groups", "statistics")}
    adam = kind([continued], lr=LR, betas=(BETA1, BETA2), eps=EPS, foreach=foreach, **kept)
    adam.load_state_dict(
        {
            "state": copy.deepcopy(balanced.state_dict()["state"]),
            "param_groups": adam.state_dict()["param_groups"],
        }
    )
    for gradient in drawn[25:]:
        for each, optimizer in ((parameter, balanced), (continued, adam)):
            each.grad = torch.as_tensor(gradient, dtype=torch.float32)
            optimizer.step()
        assert torch.equal(parameter, continued)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("off", [OFF, {"early_steps": 0}], ids=["all parts off", "no early phase"])
def test_is_adam_from_the_first_step_without_parts(off: dict[str, Any], decoupled: bool) -> None:
    ours, theirs = (nn.Parameter(torch.ones(SHAPE)) for _ in range(2))
    balanced = make(ours, **off, decoupled=decoupled, weight_decay=0.1)
    adam = torch.optim.Adam(
        [theirs], lr=LR, betas=(BETA1, BETA2), weight_decay=0.1, decoupled_weight_decay=decoupled
    )
    for gradient in gradients_of(30):
        for parameter, optimizer in ((ours, balanced), (theirs, adam)):
            parameter.grad = torch.as_tensor(gradient, dtype=torch.float32)
            optimizer.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("masked_entry", ["floor", "hold"])
@pytest.mark.parametrize("options", [{}, {"kept_components": 0.3}, {"groups": "cluster"}], ids=str)
def test_no_step_is_huge(masked_entry: str, options: dict[str, Any]) -> None:
    """Entries whose V is zero, tiny, or just came alive. Measured scales allow twice Adam's step, 0.4 of a
    bias 1.6 times that, pruning twice; Adam's own first step after silence is at most
    (1 - beta1) / sqrt(1 - beta2) = 3.2 times lr."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
    balanced = BalancedAdam(balanced_adam_groups(model), lr=LR, masked_entry=masked_entry, **options)
    random = torch.Generator().manual_seed(0)
    for step in range(60):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random) * 10.0 ** (step % 7 - 6)
            parameter.grad[::2] *= float(step > 10)
        balanced.step()
        for old, parameter in zip(before, model.parameters(), strict=True):
            assert ((parameter.detach() - old).abs() <= LR * 3.2 * 2.0 * 1.6 * 2.0).all(), step


def test_an_entry_without_gradient_stays_where_it_is() -> None:
    parameter = nn.Parameter(torch.ones(SHAPE))
    balanced = make(parameter)
    for gradient in gradients_of(30):
        parameter.grad = torch.as_tensor(gradient, dtype=torch.float32)
        parameter.grad[1] = 0.0
        balanced.step()
    assert (parameter[1] == 1.0).all()
    assert (parameter[0] != 1.0).all()


def test_cluster_scales_reach_over_groups_of_a_kind() -> None:
    """Two quiet and one noisy weight of a kind, in two groups: c is the cluster's mean over the kind's."""
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(4)]
    deviations = [1.0, 1.2, 3.0, 7.0]
    groups = [
        {"params": parameters[:1], "kind": "linear_mlp"},
        {"params": parameters[1:3], "kind": "linear_mlp", "weight_decay": 0.0},
        {"params": parameters[3:], "kind": "bias"},
    ]
    options: dict[str, Any] = {"groups": "cluster", "dimension_scaling": False, "masking": False, "eps": 0.0}
    balanced = BalancedAdam(groups, lr=1.0, **options)
    for parameter, deviation in zip(parameters, deviations, strict=True):
        parameter.grad = torch.tensor([deviation, -deviation], dtype=torch.float64)
    balanced.step()
    mean = (1.0 + 1.2 + 3.0) / 3.0
    for parameter, scale in zip(parameters, [1.1 / mean, 1.1 / mean, 3.0 / mean, 1.0], strict=True):
        assert -parameter[0].item() == pytest.approx(1.0 / math.sqrt(scale), rel=1e-6)


def test_a_single_entry_is_no_quiet_cluster() -> None:
    """One number has no deviation; as 0 it would be read as very quiet and step twice as far."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((1,), (), (2,))]
    options: dict[str, Any] = {"groups": "cluster", "masking": False, "eps": 0.0}
    balanced = BalancedAdam(parameters, lr=1.0, **options)
    for parameter in parameters:
        parameter.grad = torch.arange(1.0, 1.0 + parameter.numel(), dtype=torch.float64).view(parameter.shape)
    balanced.step()
    assert parameters[0].item() == parameters[1].item() == pytest.approx(-1.0, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled": True}],
    ids=str,
)
def test_a_scale_of_one_is_adam_up_to_rounding(options: dict[str, Any]) -> None:
    """Adam's options in the early phase, too. Gradients fall, so that amsgrad's largest V matters."""
    ours, theirs = (nn.Parameter(torch.ones(SHAPE, dtype=torch.float64)) for _ in range(2))
    balanced = BalancedAdam([ours], lr=LR, masking=False, dimension_scaling=False, **options)
    torchs = {key: value for key, value in options.items() if key != "decoupled"}
    adam = torch.optim.Adam([theirs], lr=LR, decoupled_weight_decay=options.get("decoupled", False), **torchs)
    for step, gradient in enumerate(gradients_of(40)):
        for parameter, optimizer in ((ours, balanced), (theirs, adam)):
            parameter.grad = torch.as_tensor(gradient) * 0.7**step
            optimizer.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("statistics", ["refresh", "freeze"])
def test_frozen_scales_stay_those_of_the_first_step(statistics: str) -> None:
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    options: dict[str, Any] = {"statistics": statistics, "masking": False, "eps": 0.0}
    balanced = BalancedAdam([parameter], lr=1.0, betas=(0.0, 0.0), **options)
    ratios = []
    for wide in (0, 1):  # first channel 0 deviates three times as much, then channel 1
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([[1.0, -1.0], [1.0, -1.0]], dtype=torch.float64)
        parameter.grad[wide] *= 3.0
        balanced.step()
        moved = (parameter.detach() - before)[:, 0]
        ratios.append((moved[1] / moved[0]).item() ** 2)
    assert ratios[0] == pytest.approx(3.0)
    assert ratios[1] == pytest.approx(3.0 if statistics == "freeze" else 1.0 / 3.0)


def test_embeddings_have_no_channels() -> None:
    gradient = torch.tensor([[9.0, -9.0], [1.0, -1.0]])
    moved = {}
    for kind in ("embedding", "linear_mlp"):
        parameter = nn.Parameter(torch.zeros(2, 2))
        balanced = BalancedAdam([{"params": [parameter], "kind": kind}], lr=1.0, masking=False)
        parameter.grad = gradient.clone()
        balanced.step()
        moved[kind] = parameter.detach().abs()
    torch.testing.assert_close(moved["embedding"], torch.ones(2, 2))
    assert (moved["linear_mlp"][0] < 1.0).all()
    assert (moved["linear_mlp"][1] > 1.0).all()


def test_rebalancing_acts_in_its_steps_and_leaves_adam_behind() -> None:
    """In steps 21 to 40, from the second window on, a steady entry steps 1 / sqrt(1.3) times as far, a
    flipping one 1 / sqrt(0.7); before, after, and for a mixed entry it is Adam."""
    ours, theirs = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    options: dict[str, Any] = {
        "rebalancing": True,
        "rebalance_start": 20,
        "rebalance_end": 40,
        "early_steps": 0,
    }
    balanced = BalancedAdam([ours], lr=LR, **options)
    adam = torch.optim.Adam([theirs], lr=LR)
    for step in range(1, 46):
        moved = []
        for parameter, optimizer in ((ours, balanced), (theirs, adam)):
            before = parameter.detach().clone()
            sign = -1.0 if step % 2 else 1.0
            mixed = -1.0 if step % 10 in (3, 6) else 1.0
            parameter.grad = torch.tensor([1.0, sign * 3.0, mixed], dtype=torch.float64)
            optimizer.step()
            moved.append(parameter.detach() - before)
        expected = torch.tensor([1.3, 0.7, 1.0]).rsqrt() if 31 <= step <= 40 else torch.ones(3)
        torch.testing.assert_close((moved[0] / moved[1]).float(), expected, rtol=1e-4, atol=0.0)
        counters = {"last_sign", "num_flips", "window_factor"} & balanced.state[ours].keys()
        assert len(counters) == (0 if not 21 <= step < 40 else 2 if step <= 30 else 3), step


def test_state_of_torchs_adam_is_taken_and_has_its_early_phase_behind_it() -> None:
    theirs = nn.Parameter(torch.ones(SHAPE))
    adam = torch.optim.Adam([theirs], lr=LR)
    drawn = [torch.as_tensor(gradient, dtype=torch.float32) for gradient in gradients_of(60)]
    for gradient in drawn[:50]:
        theirs.grad = gradient.clone()
        adam.step()
    ours = nn.Parameter(theirs.detach().clone())
    balanced = BalancedAdam([ours], lr=LR)
    balanced.load_state_dict(copy.deepcopy(adam.state_dict()))
    for gradient in drawn[50:]:
        for parameter, optimizer in ((ours, balanced), (theirs, adam)):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_state_of_torchs_adam_leaves_groups_and_settings_as_they_are() -> None:
    """Taken at step 10, the rest of the early phase follows, scaled as the new optimizer's groups say."""
    theirs, ours = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    adam = torch.optim.Adam([theirs], lr=LR)
    balanced = BalancedAdam([{"params": [ours], "kind": "bias", "group_scale": 0.25}], masking=False)
    for _ in range(60):
        ours.grad = torch.ones(3)
        balanced.step()
    for step in range(60):
        if step == 10:
            balanced.load_state_dict(copy.deepcopy(adam.state_dict()))
        before = ours.detach().clone()
        for parameter, optimizer in ((theirs, adam), (ours, balanced))[: 1 if step < 10 else 2]:
            parameter.grad = torch.ones(3)
            optimizer.step()
        if step >= 10:
            expected = torch.full((3,), LR * (2.0 if step < 50 else 1.0))
            torch.testing.assert_close(before - ours.detach(), expected, rtol=1e-4, atol=1e-6)
    assert balanced.param_groups[0]["kind"] == "bias"


def test_phase_goes_by_adams_step_where_a_checkpoint_holds_tensors_only() -> None:
    """A checkpoint may keep the state tensors and rebuild the groups from the config."""
    whole = nn.Parameter(torch.ones(SHAPE))
    first = make(whole, early_steps=30)
    drawn = [torch.as_tensor(gradient, dtype=torch.float32) for gradient in gradients_of(50)]
    for gradient in drawn[:25]:
        whole.grad = gradient.clone()
        first.step()
    resumed = nn.Parameter(whole.detach().clone())
    second = make(resumed, early_steps=30)
    groups = second.state_dict()["param_groups"]
    second.load_state_dict({"state": copy.deepcopy(first.state_dict()["state"]), "param_groups": groups})
    for gradient in drawn[25:]:
        for parameter, optimizer in ((whole, first), (resumed, second)):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(whole, resumed)


def test_parameters_that_join_later_have_an_early_phase_of_their_own() -> None:
    first = nn.Parameter(torch.ones(2))
    optimizer = BalancedAdam([first], lr=LR, early_steps=5)
    for step in range(10):
        if step == 7:
            joined = nn.Parameter(torch.ones(2))
            optimizer.add_param_group({"params": [joined], "group_scale": 0.25})
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(2)
        optimizer.step()
    assert [group["steps_taken"] for group in optimizer.param_groups] == [10, 3]
    torch.testing.assert_close(joined.detach(), torch.full((2,), 1.0 - 3 * LR / math.sqrt(0.25)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_steps": -1}, "early_steps = -1"),
        ({"groups": "type"}, "groups = 'type'"),
        ({"statistics": "once"}, "statistics = 'once'"),
        ({"mask_steps": 128}, "mask_steps = 128"),
        ({"kept_components": 0.0}, "kept_components = 0.0"),
        ({"masked_entry": "zero"}, "masked_entry = 'zero'"),
        (
            {"rebalancing": True, "rebalance_start": 10},
            "early_steps <= rebalance_start < rebalance_end, not 50, 10",
        ),
        ({"betas": (torch.tensor(0.9), torch.tensor(0.99))}, "betas must be floats"),
    ],
)
def test_settings_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BalancedAdam([nn.Parameter(torch.ones(2))], **options)


def test_settings_of_a_group_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="mask_threshold = -1"):
        BalancedAdam([{"params": [nn.Parameter(torch.ones(2))], "mask_threshold": -1.0}])
    with pytest.raises(ValueError, match="group_scale = 0"):
        BalancedAdam([{"params": [nn.Parameter(torch.ones(2))], "group_scale": 0.0}])
