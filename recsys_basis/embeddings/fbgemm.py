"""Row-optimizer settings in FBGEMM's words: its fused module is the yardstick for ours."""

from __future__ import annotations

from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.schema import ConfigError

_OPTIMIZERS = {
    "sgd": (EmbOptimType.EXACT_SGD, {"cpu", "cuda"}),
    "rowwise_adagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"cpu", "cuda"}),
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, {"cpu", "cuda"}),
    "adam": (EmbOptimType.ADAM, {"cuda"}),
    "partial_rowwise_adam": (EmbOptimType.PARTIAL_ROWWISE_ADAM, {"cuda"}),
}


def fbgemm_fused_params(config: RowOptimizerConfig, device_type: str) -> dict[str, Any]:
    """TorchRec ``fused_params`` for FBGEMM's own module.

    Raises ConfigError where FBGEMM has no such optimizer on ``device_type``.
    """
    supported = sorted(name for name, (_, devices) in _OPTIMIZERS.items() if device_type in devices)
    if config.rule not in supported:
        raise ConfigError(
            f"embedding.kernel = fbgemm: FBGEMM has no {config.rule!r} on {device_type}, only "
            f"{', '.join(supported)}; choose one of these, or embedding.kernel=auto"
        )
    if config.weight_decay:
        raise ConfigError(
            "embedding.kernel = fbgemm takes no decoupled row_optimizer.weight_decay: set it to 0"
        )
    if config.clip.is_on:
        raise ConfigError(
            "embedding.kernel = fbgemm does not clip rows' gradients: choose row_optimizer/clip=none, or "
            "embedding.kernel=auto"
        )
    values = config.model_dump()
    names = ("learning_rate", "eps", "beta1", "beta2")
    params = {name: values[name] for name in names if name in values}
    return {"optimizer": _OPTIMIZERS[config.rule][0], **params}
