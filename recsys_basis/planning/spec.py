"""Config of a plan: the root of configs/plan.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recsys_basis.embeddings.spec import EmbeddingConfig
from recsys_basis.ingest.manifest import Manifest
from recsys_basis.row_optimizers.choice import RowOptimizerChoice

Count = Annotated[int, Field(ge=1)]


class PlanConfig(RowOptimizerChoice):
    """Which tables, on which ranks; defaults and their meaning in configs/plan.yaml."""

    embedding: EmbeddingConfig
    cardinalities: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)] | None
    prepared_dir: str | None
    device: Literal["cuda", "cpu"]
    world_size: Annotated[int, Field(ge=1, le=4096)]
    """W."""
    ranks_per_node: Count
    memory_gb: Annotated[float, Field(gt=0.0)]
    """Of a rank, in 10^9 bytes."""
    batch_size: Count
    """Rows of a global batch, all ranks together."""
    shown_tables: Count | None

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if (self.cardinalities is None) == (self.prepared_dir is None):
            raise ValueError(
                "say which tables, once: by cardinalities=[...], by prepared_dir=..., or by preset=..."
            )
        return self

    def ids_by_table(self) -> Mapping[str, int]:
        """Raises DataError where ``prepared_dir`` is not a prepared folder."""
        if self.prepared_dir is not None:
            return Manifest.load(Path(self.prepared_dir)).cardinalities
        assert self.cardinalities is not None
        return {f"C{number}": ids for number, ids in enumerate(self.cardinalities, start=1)}
