"""What a masked entry reads."""

from __future__ import annotations

import torch

from recsys_basis.dense_optimizers.balanced_masking import mask_flipping, mask_small

FIRST = torch.tensor([1.0, 2.0, 3.0, 4.0])
SECOND = torch.tensor([0.0, 0.25, 1.0, 2.75])  # mean 1: below 0.3 are the first two


def test_floor_reads_the_bound() -> None:
    first, root = mask_small(FIRST, SECOND, 0.3, "floor")
    torch.testing.assert_close(root.square(), torch.tensor([0.3, 0.3, 1.0, 2.75]))
    assert torch.equal(first, FIRST)


def test_hold_keeps_the_entry_still() -> None:
    first, root = mask_small(FIRST, SECOND, 0.3, "hold")
    torch.testing.assert_close(root.square(), SECOND)
    assert torch.equal(first, torch.tensor([0.0, 0.0, 3.0, 4.0]))


def test_more_flips_than_the_limit_mask_m() -> None:
    flips = torch.tensor([0, 3, 4, 20], dtype=torch.int8)
    assert torch.equal(mask_flipping(FIRST, flips, 3), torch.tensor([1.0, 2.0, 0.0, 0.0]))
    assert torch.equal(mask_flipping(FIRST, flips, 127), FIRST)


def test_inputs_are_left_alone() -> None:
    first, second = FIRST.clone(), SECOND.clone()
    for entry in ("floor", "hold"):
        mask_small(first, second, 0.3, entry)
        mask_flipping(first, torch.full((4,), 9, dtype=torch.int8), 3)
    assert torch.equal(first, FIRST)
    assert torch.equal(second, SECOND)


def test_a_silent_tensor_is_not_masked_into_motion() -> None:
    first, root = mask_small(torch.zeros(3), torch.zeros(3), 0.3, "floor")
    assert torch.equal(first, torch.zeros(3))
    assert torch.equal(root, torch.zeros(3))
