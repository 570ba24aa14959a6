"""Tests of the compiled kernels skip, aloud, where they were not compiled."""

from __future__ import annotations

import pytest

from recsys_basis.kernels.extension import missing_reason


def require_kernels() -> None:
    """Skip the test that calls it, with the reason, if the kernels are not there."""
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
