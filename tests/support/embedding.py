"""The section ``embedding`` as a test wants it: the defaults file with changes."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from recsys_basis.config_folder import config_folder
from recsys_basis.embeddings.spec import EmbeddingConfig
from recsys_basis.schema import parse_section


def embedding_config(**changes: Any) -> EmbeddingConfig:
    defaults = OmegaConf.load(config_folder() / "embedding" / "default.yaml")
    return parse_section(EmbeddingConfig, dict(defaults.items()) | changes, "embedding")
