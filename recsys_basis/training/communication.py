"""What ranks send each other in fewer bits: pooled vectors and their gradients, and the towers' gradients.

Tables: TorchRec's codecs around its collectives. Towers: DistributedDataParallel's communication hooks;
PowerSGD is Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, whose error feedback lives outside
checkpoints: a resumed run starts it anew, so it does not continue to the same bits.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys_basis.schema import ConfigError, Section


class CommunicationConfig(Section):
    """Section ``communication`` of configs/train.yaml."""

    embeddings: Literal["fp32", "fp16", "bf16"]
    """Pooled vectors on their way from the tables, and gradients on their way back."""
    towers: Literal["fp32", "fp16", "powersgd"]
    powersgd_rank: Annotated[int, Field(ge=1)]
    powersgd_start_step: Annotated[int, Field(ge=2)]
    """Steps before it send whole gradients."""


def embedding_codecs(
    config: CommunicationConfig, batch_size: int, device: torch.device
) -> dict[str, Any] | None:
    """TorchRec's codecs by collective; None for fp32. ``batch_size``: rows of a global batch.

    Raises ConfigError on a CPU: with the collectives that ranks of unequal batches need there, torchrec 1.8
    ignores the codecs of backward, and gradients travel in fp16 unscaled (1.6 % off at 64 rows).
    """
    if config.embeddings == "fp32":
        return None
    if device.type == "cpu":
        raise ConfigError(
            f"communication.embeddings = {config.embeddings}: needs GPUs: over gloo TorchRec would send "
            "gradients that are too small for fp16; choose fp32"
        )
    precision = CommType(config.embeddings)
    codecs = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=precision, backward_precision=precision), device=device
    )
    assert codecs is not None
    if config.embeddings == "fp16":
        scale = float(1 << (batch_size.bit_length() - 1))
        for each in codecs.values():
            each.backward = Scaled(each.backward, scale)
    return codecs


class Scaled:
    """``codec`` for numbers too small for fp16: the gradient of a mean over the batch goes as that of the
    sum, nearly; a power of two changes no bits.

    FBGEMM's own loss scale does not serve: its decoder divides what is still fp16, and the small numbers are
    lost there.
    """

    def __init__(self, codec: Any, scale: float) -> None:
        self.codec, self.scale = codec, scale

    def encode(self, numbers: torch.Tensor, context: Any = None) -> torch.Tensor:
        return self.codec.encode(numbers * self.scale, context)

    def decode(self, sent: torch.Tensor, context: Any = None) -> torch.Tensor:
        return self.codec.decode(sent, context) / self.scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)


def compress_towers(config: CommunicationConfig, model: DistributedModelParallel) -> None:
    """Register the hook of ``config.towers``."""
    towers = model._dmp_wrapped_module
    assert isinstance(towers, DistributedDataParallel)
    if config.towers == "fp16":
        towers.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.towers == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.powersgd_rank,
            start_powerSGD_iter=config.powersgd_start_step,
        )
        towers.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
