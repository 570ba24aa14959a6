"""The base of every typed config section, and how a refusal reads.

Defaults live in ``configs/*.yaml`` and nowhere else: a section here names its keys,
types and bounds, so a config file or an override that misses a key, invents one, or
leaves the bounds is refused before any work starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from recsys_basis.errors import UserError

SectionType = TypeVar("SectionType", bound="Section")


class ConfigError(UserError, ValueError):
    """A config key is unknown, missing, of the wrong type, or out of its bounds."""


class Section(BaseModel):
    """A frozen, hashable config section that forbids unknown keys and lossy conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def parse_section(section: type[SectionType], values: Mapping[str, Any], where: str = "") -> SectionType:
    """Validate ``values`` as ``section``; ``where`` is the dotted path of the section, if any.

    Raises ConfigError with one line per bad key, each naming the dotted key, the value and the reason.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_explain(error, where)) from None


def _explain(error: ValidationError, where: str) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in ((where,) if where else ()) + problem["loc"])
        match problem["type"]:
            case "extra_forbidden":
                lines.append(f"unknown key {key!r}: remove it, or correct its spelling")
            case "missing":
                lines.append(f"missing key {key!r}: its config file must give a value")
            case "value_error":
                reason = str(problem["msg"]).removeprefix("Value error, ")
                lines.append(f"{key}: {reason}" if key else reason)
            case _:
                lines.append(f"{key} = {problem['input']!r}: {problem['msg']}")
    return "\n".join(lines)
