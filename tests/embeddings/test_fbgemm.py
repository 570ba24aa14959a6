"""Settings in FBGEMM's words, and what it cannot do, by name."""

from __future__ import annotations

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from recsys_basis.embeddings.fbgemm import fbgemm_fused_params
from recsys_basis.row_optimizers import row_clip_defaults, row_optimizer_defaults
from recsys_basis.schema import ConfigError


def test_settings_are_handed_on() -> None:
    config = row_optimizer_defaults("rowwise_adagrad", learning_rate=0.3, eps=1e-4)
    assert fbgemm_fused_params(config, "cpu") == {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.3,
        "eps": 1e-4,
    }


def test_adam_is_there_on_gpus_alone() -> None:
    config = row_optimizer_defaults("adam")
    assert fbgemm_fused_params(config, "cuda")["optimizer"] == EmbOptimType.ADAM
    with pytest.raises(ConfigError, match="no 'adam' on cpu, only adagrad, rowwise_adagrad, sgd"):
        fbgemm_fused_params(config, "cpu")


def test_clipping_is_refused() -> None:
    config = row_optimizer_defaults("sgd", clip=row_clip_defaults("cowclip").model_dump())
    with pytest.raises(ConfigError, match="row_optimizer/clip=none"):
        fbgemm_fused_params(config, "cpu")


def test_weight_decay_is_refused() -> None:
    config = row_optimizer_defaults("sgd", weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"row_optimizer\.weight_decay"):
        fbgemm_fused_params(config, "cpu")
