"""Config of one training run: the root of configs/train.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from recsys_basis.checkpoints.folder import Metric, list_checkpoints
from recsys_basis.dense_optimizers import DenseOptimizerConfig, parse_dense_optimizer
from recsys_basis.embeddings.spec import EmbeddingConfig
from recsys_basis.ingest.spec import DatasetConfig
from recsys_basis.models import ModelConfig
from recsys_basis.row_optimizers.choice import RowOptimizerChoice
from recsys_basis.training.communication import CommunicationConfig
from recsys_basis.training.runtime import RuntimeConfig
from recsys_basis.training.schedule import ScheduleConfig


class TrainConfig(RowOptimizerChoice):
    """Everything that decides a run; its resolved form is saved with the run."""

    dataset: DatasetConfig
    model: ModelConfig
    embedding: EmbeddingConfig
    dense_optimizer: SerializeAsAny[DenseOptimizerConfig]
    schedule: ScheduleConfig
    communication: CommunicationConfig
    runtime: RuntimeConfig

    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Decides initial weights and the order of rows."""
    batch_size: Annotated[int, Field(ge=1)]
    """Rows of a global batch, all ranks together."""
    epochs: Annotated[int, Field(ge=1)]
    shuffle_window: Annotated[int, Field(ge=0)]
    """Row groups shuffled together in memory; 0 keeps the order of time."""
    prefetch_batches: Annotated[int, Field(ge=0)]
    """Batches that a thread makes ahead of the step that takes them; 0: each is made between the steps."""
    max_gradient_norm: Annotated[float, Field(gt=0.0)] | None
    """Norm over towers and embedding rows together, above which all are scaled down; null: off."""
    tower_average_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    """Decay a step of the moving average of the towers' weights that evaluation uses; null: none."""
    holdout_fraction: Annotated[float, Field(ge=0.0, lt=1.0)]
    """0: train on all training rows, evaluate on test. Else evaluate on this last part of the training
    rows and train on the rest, so that a search never sees the test rows."""
    max_train_rows: Annotated[int, Field(ge=1)] | None
    """Train on at most so many of those rows, the last ones in time; null: on all."""
    evaluate_every_steps: Annotated[int, Field(ge=1)] | None
    log_every_steps: Annotated[int, Field(ge=1)]
    diagnostics_every_steps: Annotated[int, Field(ge=1)] | None
    """Read the row optimizer's state at these steps and the last (recsys_basis.diagnostics); null: never."""
    checkpoint_every_steps: Annotated[int, Field(ge=1)] | None
    """null: at the end only."""
    checkpoint_asynchronous: bool
    """Whether files are written beside training, from a copy of weights and state."""
    checkpoint_keep: Annotated[int, Field(ge=1)]
    """Newest checkpoints that stay."""
    checkpoint_best_by: Metric | None
    """Metric of evaluation by which the best checkpoint stays as well; null: none."""
    resume: str
    """auto, never, or the path of a checkpoint."""
    output_dir: str

    @property
    def resume_path(self) -> Path | None:
        """The checkpoint that ``resume`` names, if it names one."""
        return None if self.resume in ("auto", "never") else Path(self.resume)

    @model_validator(mode="after")
    def _has_where_to_begin(self) -> TrainConfig:
        # A run restarted goes on from a checkpoint of its own, whatever has become of that one.
        path, own = self.resume_path, list_checkpoints(Path(self.output_dir) / "checkpoints")
        if path is not None and not path.is_dir() and not own:
            raise ValueError(
                f"resume = {self.resume}: it is auto, never, or the folder of a checkpoint "
                "(.../checkpoints/step-N)"
            )
        return self

    @model_validator(mode="after")
    def _best_is_evaluated(self) -> TrainConfig:
        if self.checkpoint_best_by is not None and self.evaluate_every_steps is None:
            raise ValueError("checkpoint_best_by needs evaluate_every_steps: only evaluated weights compare")
        return self

    @field_validator("dense_optimizer", mode="before")
    @classmethod
    def _dense_optimizer(cls, value: Any) -> Any:
        return value if isinstance(value, DenseOptimizerConfig) else parse_dense_optimizer(value)
