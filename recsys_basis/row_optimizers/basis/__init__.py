"""BASIS: optimizer state shared by hashed buckets. Start reading at ``spec.py``."""

from recsys_basis.row_optimizers.basis.reference import Basis
from recsys_basis.row_optimizers.basis.spec import BasisConfig

__all__ = ["Basis", "BasisConfig"]
