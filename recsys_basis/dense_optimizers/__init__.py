"""Optimizers of the dense towers: SM3, Balanced Adam, and torch's own by name.

``SM3`` and ``BalancedAdam`` are torch optimizers for any program. Jobs build them, and the rest of
``DENSE_OPTIMIZERS``, from a config section with ``create_dense_optimizer``. docs/dense_optimizers.md
compares them.
"""

from recsys_basis.dense_optimizers.balanced_adam import BalancedAdam
from recsys_basis.dense_optimizers.balanced_groups import GROUP_SCALES, balanced_adam_groups
from recsys_basis.dense_optimizers.config import (
    DENSE_OPTIMIZERS,
    DenseOptimizerConfig,
    dense_optimizer_defaults,
    parse_dense_optimizer,
)
from recsys_basis.dense_optimizers.create import create_dense_optimizer
from recsys_basis.dense_optimizers.sm3 import SM3

__all__ = [
    "DENSE_OPTIMIZERS",
    "GROUP_SCALES",
    "SM3",
    "BalancedAdam",
    "DenseOptimizerConfig",
    "balanced_adam_groups",
    "create_dense_optimizer",
    "dense_optimizer_defaults",
    "parse_dense_optimizer",
]
