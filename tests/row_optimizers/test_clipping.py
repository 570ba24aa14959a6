"""Clipping of rows' gradients, by both kernels and through whole bags, against its formula row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.kernels import require_kernels

from recsys_basis.embeddings.bags import RowOptimizedEmbeddingBags
from recsys_basis.embeddings.spec import BagsKernel
from recsys_basis.row_optimizers import row_clip_defaults, row_optimizer_defaults
from recsys_basis.row_optimizers.clipping import RowClip
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table, TableShard

CLIPS = {
    "norm": RowClip(max_norm=0.7, cowclip_ratio=None, cowclip_min_norm=1.0),
    "cowclip": RowClip(max_norm=None, cowclip_ratio=0.4, cowclip_min_norm=0.3),
    "both": RowClip(max_norm=1.1, cowclip_ratio=0.4, cowclip_min_norm=0.3),
    "off": RowClip(max_norm=None, cowclip_ratio=None, cowclip_min_norm=1.0),
}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # float32 norms against float64


def make_bags(kernel: BagsKernel, clip: RowClip, width: int, hold: bool) -> RowOptimizedEmbeddingBags:
    """Two features of one table; SGD of rate 1, so that a row's change is its gradient after clipping."""
    config = row_optimizer_defaults("sgd", learning_rate=1.0, clip=clip.model_dump())
    shards = [TableShard.whole(Table("site", 40, width, 1))]
    bags = RowOptimizedEmbeddingBags(shards, [0, 0], config, hold_gradients=hold, kernel=kernel)
    generator = torch.Generator().manual_seed(1)
    scale = 10 ** torch.empty(40, 1).uniform_(-1.5, 0.5, generator=generator)
    bags.weights.copy_(scale * torch.randn(40, width, generator=generator))
    bags.weights[5] = 0
    return bags


def clipped(clip: RowClip, weights: torch.Tensor, gradient: torch.Tensor, count: int) -> torch.Tensor:
    limit = math.inf if clip.max_norm is None else clip.max_norm
    if clip.cowclip_ratio is not None:
        limit = min(limit, count * max(clip.cowclip_ratio * float(weights.norm()), clip.cowclip_min_norm))
    norm = float(gradient.norm())
    return gradient * min(1.0, limit / norm) if norm > 0 else gradient


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("width", [1, 3, 16, 100])
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("kernel", ["torch", "cpp"])
def test_each_row_s_gradient_is_shortened_by_its_own_limit(
    kernel: BagsKernel, name: str, width: int, hold: bool
) -> None:
    if kernel == "cpp":
        require_kernels()
    clip = CLIPS[name]
    bags = make_bags(kernel, clip, width, hold)
    before = bags.weights.double()
    generator = torch.Generator().manual_seed(2)
    ids = (torch.rand(60, generator=generator) ** 2 * 40).long()
    ids[:3] = 5  # the row of zeros
    upstream = 10 ** torch.empty(30, 1).uniform_(-2, 1, generator=generator) * torch.randn(
        30, 2 * width, generator=generator
    )
    bags(ids, torch.arange(61)).backward(upstream)
    if hold:
        assert torch.equal(bags.weights.double(), before)
        bags.apply_held()
    by_item = torch.cat([upstream[:, :width], upstream[:, width:]]).double()
    shortened = 0
    for row in range(40):
        mine = ids == row
        whole = by_item[mine].sum(0)
        expected = clipped(clip, before[row], whole, int(mine.sum()))
        shortened += not torch.equal(whole, expected)
        torch.testing.assert_close(before[row] - bags.weights[row].double(), expected, **TOLERANCE)
    touched = len(set(ids.tolist()))
    assert shortened == 0 if name == "off" else 3 < shortened < touched


def test_counts_are_taken_only_where_they_are_asked_for() -> None:
    assert [clip.needs_counts for clip in CLIPS.values()] == [False, True, True, False]
    assert [clip.is_on for clip in CLIPS.values()] == [True, True, True, False]
    for name, clip in CLIPS.items():
        bags = make_bags("torch", clip, 3, hold=True)
        bags(torch.tensor([3, 3, 7, 3]), torch.arange(5)).sum().backward()
        assert bags.held is not None
        counts = bags.held.counts
        assert (None if counts is None else counts.tolist()) == ([3, 1] if clip.needs_counts else None), name


def test_presets() -> None:
    assert not row_clip_defaults("none").is_on
    cowclip = row_clip_defaults("cowclip")
    assert (cowclip.max_norm, cowclip.cowclip_ratio, cowclip.cowclip_min_norm) == (None, 1.0, 1e-5)
    with pytest.raises(ConfigError, match="known: cowclip, none"):
        row_clip_defaults("cow")


@pytest.mark.parametrize("key", ["max_norm", "cowclip_ratio", "cowclip_min_norm"])
def test_bounds(key: str) -> None:
    values: dict[str, Any] = CLIPS["both"].model_dump() | {key: 0.0}
    with pytest.raises(ConfigError, match=rf"row_optimizer\.clip\.{key}\b"):
        row_optimizer_defaults("sgd", clip=values)
