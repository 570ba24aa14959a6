"""Measured scales: hand-computed cases, and scikit-learn's k-means for the split."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from recsys_basis.dense_optimizers.balanced_scaling import (
    channel_scale,
    cluster_scales,
    deviations,
    split_in_two,
)

Kernel = Literal["auto", "torch"]


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
    akin = torch.ones(len(values), len(values), dtype=torch.float64)
    assert split_in_two(torch.as_tensor(values), akin).tolist() == upper.tolist()


def test_equal_values_are_not_split() -> None:
    """Beside another kind, whose values are."""
    kinds = torch.tensor([0, 1, 0, 1, 0])
    upper = split_in_two(torch.tensor([0.1, 5.0, 0.1, 7.0, 0.1]), (kinds == kinds[:, None]).float())
    assert upper[kinds == 1].tolist() == [False, True]
    assert len(set(upper[kinds == 0].tolist())) == 1


def test_cluster_scales_split_each_kind_alone() -> None:
    """Deviations 1, 1, 4 of one kind: clusters 1 and 4, mean 2. The other kinds have one and two members."""
    scales = cluster_scales(torch.tensor([1.0, 4.0, 1.0, 100.0, 0.2, 0.6]), ["a", "a", "a", "b", "c", "c"])
    torch.testing.assert_close(scales, torch.tensor([0.5, 2.0, 0.5, 1.0, 0.5, 1.5]))


def test_cluster_scales_use_the_ratio_of_deviations_not_their_difference() -> None:
    """1, 10 and 60: in logarithms 10 is nearer to 60, by difference it is nearer to 1."""
    scales = cluster_scales(torch.tensor([1.0, 10.0, 60.0]), ["a"] * 3)
    mean = 71.0 / 3.0
    torch.testing.assert_close(scales, torch.tensor([1.0 / mean, 35.0 / mean, 35.0 / mean]))


def test_cluster_scales_of_equal_or_silent_gradients_are_one() -> None:
    for deviation in (2.0, 0.0):
        measured = torch.tensor([9.0, deviation, deviation, deviation])
        torch.testing.assert_close(cluster_scales(measured, ["a", "b", "b", "b"]), torch.ones(4))


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_deviations_of_any_shape(kernel: Kernel) -> None:
    """The mean is large beside the deviation, as sums of squares would not survive."""
    gradients = [torch.randn(shape) * 3.0 + 1e3 for shape in ((5,), (4, 3), (2, 3, 4), (3000,), (1,))]
    expected = [gradient.double().numpy().std() for gradient in gradients]
    measured = deviations(gradients, [kernel] * len(gradients))
    torch.testing.assert_close(measured.double(), torch.tensor(expected), rtol=1e-4, atol=0.0)
