"""Parameter groups by rules: parameters whose options agree share a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def group_parameters(
    named_parameters: NamedParameters, options: Callable[[str, nn.Parameter], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, in order of first appearance; parameters carry their names.

    ``options(name, parameter)`` gives what the group sets for it: plain hashable values. Parameters that
    need no gradient are left out.
    """
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        values = options(name, parameter)
        key = tuple(sorted(values.items()))
        groups.setdefault(key, {"params": [], **values})["params"].append((name, parameter))
    return list(groups.values())


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether ``name``, dotted, is one of the glob ``patterns`` (* also crosses dots; case counts)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
