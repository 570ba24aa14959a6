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
    """For --help: the job's commented YAML, and the options of each config group."""
    folder = config_folder()
    lines = [(folder / f"{job}.yaml").read_text().rstrip(), "", "Options of the config groups:"]
    for group in sorted(path for path in folder.iterdir() if path.is_dir()):
        options = ", ".join(sorted(option.stem for option in group.glob("*.yaml")))
        lines.append(f"  {group.name}={options}")
    return "\n".join(lines)


def config_path(group: str, option: str) -> Path:
    """File of one option of a config group."""
    return config_folder() / group / f"{option}.yaml"
