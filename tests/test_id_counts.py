"""Counts of ids in runs: the same numbers, and few of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_basis.id_counts import IdCounts


@settings(deadline=None, max_examples=60, derandomize=True)
@given(first=st.integers(0, 50), others=st.lists(st.integers(0, 50), max_size=40))
def test_runs_spell_out_the_counts(first: int, others: list[int]) -> None:
    counts = np.array([first, *sorted(others, reverse=True)])
    runs = IdCounts.of(counts)
    lengths = np.diff([*runs.starts.tolist(), len(counts)])
    assert np.repeat(runs.counts.numpy(), lengths).tolist() == counts.tolist()
    assert len(runs.counts) <= (2 * counts.sum()) ** 0.5 + 2, "and one more where ids never came"
