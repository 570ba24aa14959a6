"""Measured scales: hand-computed cases, and scikit-learn's k-means for the split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from recsys_basis.dense_optimizers.balanced_scaling import channel_scale, cluster_scales, split_in_two


def test_channel_scale_is_deviation_over_mean_deviation() -> None:
    gradient = torch.tensor([[1.0, 3.0], [5.0, 5.0], [0.0, 10.0]])  # deviations 1, 0, 5
    torch.testing.assert_close(channel_scale(gradient), torch.tensor([[0.5], [0.0], [2.5]]))


def test_channel_scale_covers_all_axes_but_the_first() -> None:
    gradient = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    deviations = gradient.numpy().reshape(3, -1).std(axis=1)
    expected = torch.as_tensor(deviations / deviations.mean()).reshape(3, 1, 1, 1)
    torch.testing.assert_close(channel_scale(gradient), expected)


@pytest.mark.parametrize(
    "gradient", [torch.zeros(3, 4), torch.arange(3.0)[:, None]], ids=["zero", "fan-in 1"]
)
def test_channel_scale_is_one_where_nothing_deviates(gradient: torch.Tensor) -> None:
    assert torch.equal(channel_scale(gradient), torch.ones(3, 1))


@pytest.mark.parametrize("seed", range(10))
def test_split_is_that_of_kmeans(seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(3 + 2 * seed) ** 3
    kmeans = KMeans(n_clusters=2, n_init=50, random_state=0).fit(values[:, None])
    upper = kmeans.labels_ == kmeans.cluster_centers_.argmax()
    assert split_in_two(torch.as_tensor(values)).tolist() == upper.tolist()


def test_split_of_one_and_of_equal_values() -> None:
    assert split_in_two(torch.tensor([3.0])).tolist() == [True]
    assert len(split_in_two(torch.tensor([3.0, 3.0, 3.0]))) == 3


def test_cluster_scales_split_each_kind_alone() -> None:
    """Deviations 1, 1, 4 of one kind: clusters 1 and 4, mean 2. The other kind has one member."""
    base = torch.tensor([1.0, -1.0])
    scales = cluster_scales([base, 100 * base, 4 * base, base], ["a", "b", "a", "a"])
    torch.testing.assert_close(torch.stack(scales), torch.tensor([0.5, 1.0, 2.0, 0.5]))


def test_cluster_scales_use_the_ratio_of_deviations_not_their_difference() -> None:
    """1, 10 and 60: in logarithms 10 is nearer to 60, by difference it is nearer to 1."""
    base = torch.tensor([1.0, -1.0])
    scales = torch.stack(cluster_scales([base, 10 * base, 60 * base], ["a"] * 3))
    mean = 71.0 / 3.0
    torch.testing.assert_close(scales, torch.tensor([1.0 / mean, 35.0 / mean, 35.0 / mean]))


def test_cluster_scales_of_equal_or_silent_gradients_are_one() -> None:
    for base in (torch.tensor([2.0, -2.0]), torch.zeros(2)):
        assert torch.equal(torch.stack(cluster_scales([base] * 3, ["a"] * 3)), torch.ones(3))
