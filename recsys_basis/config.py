"""Hydra composes a job's YAML and overrides; the typed schema takes or refuses the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from recsys_basis.config_folder import config_folder
from recsys_basis.schema import ConfigError


def compose_job(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Plain values of ``configs/<job>.yaml`` under Hydra ``overrides``, interpolations resolved.

    Raises ConfigError naming the key for an override that no key or option answers to, and for a
    mandatory value (???) that nobody gave.
    """
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = compose(job, overrides=list(overrides))
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no default: give it, as {error.full_key}=…") from None
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        raise ConfigError("\n".join(str(part).strip() for part in (error, cause) if part)) from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def describe_job(job: str) -> str:
    """For --help: the job's commented YAML, that of each group's default option, and the other options."""
    folder = config_folder()
    parts = [_with_heading(folder / f"{job}.yaml")]
    for place, option in _default_options(job).items():
        group = place.split("@")[0]  # group@section: the section that it fills
        options = ", ".join(sorted(path.stem for path in (folder / group).glob("*.yaml")))
        parts.append(f"--- {group}=... is one of: {options}")
        if option is not None:
            parts.append(_with_heading(folder / group / f"{option}.yaml"))
    return "\n\n".join(parts)


def _default_options(job: str) -> dict[str, str | None]:
    """Config groups of ``job`` and the option each takes by default; a defaults list may name another job."""
    options: dict[str, str | None] = {}
    for entry in OmegaConf.load(config_folder() / f"{job}.yaml").defaults:
        if entry == "_self_":
            continue
        options |= _default_options(entry) if isinstance(entry, str) else dict(entry.items())
    return options


def _with_heading(path: Path) -> str:
    return f"--- configs/{path.relative_to(config_folder())}\n{path.read_text(encoding='utf-8').rstrip()}"
