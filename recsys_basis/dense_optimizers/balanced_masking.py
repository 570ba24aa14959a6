"""Balanced Adam's masks of the first steps: memory that is not worth reading yet.

A mask acts on what the step reads; the stored M and V go on as Adam's, so nothing is lost when it ends.

M is read as zero where the gradient's sign flipped more than ``mask_flips`` times so far: the entry stands
still. V is masked where it is below ``mask_threshold`` times its mean over the tensor. A V of zero in the
denominator would throw such an entry far away, so what a masked entry does is said:

    "floor"  V is read as that bound: the entry steps, but less than Adam lets it
    "hold"   the entry stands still
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from recsys_basis.dense_optimizers.balanced_signs import MAX_COUNTED_STEPS

MaskedEntry = Literal["floor", "hold"]


class Masks(NamedTuple):
    """The masks of a step, as ``BalancedSettings`` explains them."""

    threshold: float
    most_flips: int
    entry: MaskedEntry


def mask_small(
    first: Tensor, second: Tensor, threshold: float, masked_entry: MaskedEntry
) -> tuple[Tensor, Tensor]:
    """(M, sqrt V) as the step reads them, V below ``threshold`` times its mean masked; inputs are left alone.

    The root of the larger is the larger root, and that saves a pass over memory.
    """
    bound, root = threshold * second.mean(), second.sqrt()
    if masked_entry == "floor":
        return first, root.clamp_(min=bound.sqrt())
    return first * (second >= bound), root


def mask_flipping(first: Tensor, num_flips: Tensor, most: int) -> Tensor:
    """M as the step reads it: zero where ``num_flips`` > ``most``; the input is left alone."""
    kept = (min(most + 1, MAX_COUNTED_STEPS) - num_flips).clamp_(0, 1)  # that many flips do not occur
    return kept.to(first.dtype).mul_(first)  # a product of two dtypes takes three times as long
