"""Dense features and pooled vectors to one logit a row: TorchRec's DLRM and DCNv2, widths from config."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recsys_basis.schema import ConfigError, Section

Widths = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, strict=False)]


class ModelConfig(Section):
    """Section ``model``; see configs/model/*.yaml."""

    name: Literal["dlrm", "dcnv2"]
    dense_arch: Widths
    """Layer widths of the bottom tower; the last is ``embedding.embedding_dim``."""
    over_arch: Widths
    """Layer widths of the top tower; the last is 1, the logit."""
    cross_layers: Annotated[int, Field(ge=0)]
    """dcnv2 only: low-rank cross layers; 0 for dlrm."""
    cross_rank: Annotated[int, Field(ge=0)]
    """dcnv2 only: rank of a cross layer; 0 for dlrm."""


def create_model(
    config: ModelConfig, embeddings: EmbeddingBagCollection, num_dense: int, seed: int
) -> nn.Module:
    """A model with ``forward(dense [B, num_dense], KeyedJaggedTensor) -> logit [B, 1]``.

    The towers are drawn from ``seed``, the same on every rank. DLRM: Naumov et al. 2019
    (arXiv 1906.00091); DCNv2: Wang et al. 2021 (arXiv 2008.13535).
    Raises ConfigError for widths that do not fit.
    """
    (width,) = {table.embedding_dim for table in embeddings.embedding_bag_configs()}
    if config.dense_arch[-1] != width:
        raise ConfigError(
            f"model.dense_arch ends with {config.dense_arch[-1]}, not with embedding.embedding_dim = {width}"
        )
    if config.over_arch[-1] != 1:
        raise ConfigError(f"model.over_arch ends with {config.over_arch[-1]}, must end with 1 (the logit)")
    has_cross = config.name == "dcnv2"
    if (config.cross_layers > 0, config.cross_rank > 0) != (has_cross, has_cross):
        raise ConfigError("model.cross_layers and model.cross_rank are > 0 for dcnv2 and 0 for dlrm")
    widths = (list(config.dense_arch), list(config.over_arch))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.name == "dlrm":
            return DLRM(embeddings, num_dense, *widths)
        model = DLRM_DCN(embeddings, num_dense, *widths, config.cross_layers, config.cross_rank)
        model.inter_arch = CrossInteraction(model.inter_arch.crossnet)
        return model


class CrossInteraction(nn.Module):
    """TorchRec's InteractionDCNArch, for a rank with no rows as well (its reshape fails on B = 0)."""

    def __init__(self, crossnet: nn.Module) -> None:
        super().__init__()
        self.crossnet = crossnet

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """[B, (F + 1) * D] crossed, from dense [B, D] and pooled vectors [B, F, D]."""
        vectors = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        return self.crossnet(vectors.flatten(1))
