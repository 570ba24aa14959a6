"""Config of the embedding tables: width, pooling, kernel, sharding."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from recsys_basis.schema import Section
from recsys_basis.tables import MAX_PARTITIONS

ShardingName = Literal[
    "table_wise", "row_wise", "table_row_wise", "column_wise", "grid_shard", "data_parallel"
]
"""TorchRec's names."""
BagsKernel = Literal["cpp", "torch"]
"""Kernels of our own embedding bags."""
WeightDtype = Literal["float32", "bfloat16", "float16"]


class EmbeddingConfig(Section):
    """Section ``embedding``; defaults and their reasons in configs/embedding/default.yaml."""

    embedding_dim: Annotated[int, Field(ge=1, le=4096)]
    """D."""
    weight_dtype: WeightDtype
    """How weights are kept; bags are summed and rows updated in float32."""
    pooling: Literal["sum", "mean"]
    kernel: Literal["auto", "cpp", "torch", "fbgemm"]
    """Who computes lookup and update: our embedding bags by C++ kernels or in plain PyTorch, or FBGEMM."""
    sharding: Literal["auto"] | ShardingName
    table_sharding: dict[str, ShardingName] | None
    """Of single tables, by name or glob; an exact name counts before a glob, then the first that fits."""
    column_shards: Annotated[int, Field(ge=1)]
    """S: equal blocks of columns that a table is cut into under column_wise and grid_shard."""
    max_partitions: Annotated[int, Field(ge=1, le=MAX_PARTITIONS)]
    """P of large tables: a power of two."""
    min_rows_per_partition: Annotated[int, Field(ge=1)]
    """Tables get fewer partitions rather than smaller ones."""
    initial_scale: Annotated[float, Field(ge=0.0)]
    """Initial weights are uniform in +-initial_scale / sqrt(num_ids)."""

    @field_validator("max_partitions")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is not a power of two")
        return value

    @model_validator(mode="after")
    def _equal_columns(self) -> Self:
        if self.embedding_dim % self.column_shards:
            raise ValueError(
                f"column_shards = {self.column_shards} does not divide embedding_dim = {self.embedding_dim}"
            )
        return self

    def columns(self, sharding: str) -> int:
        """Columns of a table's shard under ``sharding``."""
        cut = sharding in ("column_wise", "grid_shard")
        return self.embedding_dim // self.column_shards if cut else self.embedding_dim
