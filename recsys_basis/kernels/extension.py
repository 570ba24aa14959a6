"""The compiled module of ``cpp/``, or why it is not there."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

# Before the extension: it then uses torch's OpenMP threads, instead of a second pool beside them.
import torch  # noqa: F401


@functools.cache
def _import() -> ModuleType | str:
    try:
        return importlib.import_module("recsys_basis.kernels._kernels")
    except ImportError as error:
        remedy = "install a C++17 compiler, then install recsys-basis anew"
        return f"the compiled kernels do not load ({error}); {remedy}"


def missing_reason() -> str | None:
    """Why the compiled kernels are not there, and what to do; None if they are."""
    found = _import()
    return found if isinstance(found, str) else None


def load() -> ModuleType:
    """The compiled module. Raises ImportError with ``missing_reason()``."""
    found = _import()
    if isinstance(found, str):
        raise ImportError(found)
    return found
