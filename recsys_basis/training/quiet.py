"""Warnings of libraries that a user of this program can do nothing about, silenced by name.

Each stands here with the reason why it does not matter; all others still show.
"""

from __future__ import annotations

import logging
import warnings

LOGGERS = (
    # Says that the topology was built directly: TorchRec's factory for it needs Meta's hardware names.
    "torchrec.distributed.planner.types",
    # Says that DDP and DMP trace under torch.fx, on the first forward.
    "torch.fx._symbolic_trace",
    # Says which ranks form a node, and that data-parallel tables have no cache.
    "torchrec.distributed.comm",
    "torchrec.distributed.utils",
)
ROOT_MESSAGE = "Sharding spec not found for "
"""What the planner tells the root logger of each data-parallel table: it is on all ranks, as asked."""
MESSAGES = (
    # DistributedModelParallel hands DDP an argument that torch 2.13 has renamed; the old one still works.
    r"`broadcast_buffers` is deprecated",
    # TorchRec 1.8 keeps tables in ShardedTensors, and torch's checkpoints take them.
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    # FBGEMM probes for its GPU-only optimizers when it is imported on a CPU.
    r"(?s).*Failed to import: fbgemm_gpu\.split_embedding_codegen_lookup_invokers",
    r"(?s).*The Python module fbgemm_gpu\.\S+ is now DEPRECATED",
)


def silence_known_warnings() -> None:
    """Call once a process, before the model is built."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().addFilter(_is_not_of_the_planner)
    for message in MESSAGES:
        warnings.filterwarnings("ignore", message=message)


def _is_not_of_the_planner(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(ROOT_MESSAGE)
