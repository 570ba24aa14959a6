"""The rows a run trains on and those it is judged by, held to what the manifest says of them."""

from __future__ import annotations

from pathlib import Path

from recsys_basis.batches.parquet import RowGroup, list_row_groups
from recsys_basis.ingest.errors import DataError
from recsys_basis.ingest.manifest import Manifest, SplitName
from recsys_basis.prepare import refuse_other_settings
from recsys_basis.schema import ConfigError
from recsys_basis.training.spec import TrainConfig


def open_row_groups(config: TrainConfig, manifest: Manifest) -> tuple[list[RowGroup], list[RowGroup]]:
    """Row groups to train on and to evaluate on; see ``holdout_fraction`` and ``max_train_rows``.

    Raises DataError where the prepared folder is not what its manifest or the config says.
    """
    refuse_other_settings(manifest, config.dataset)
    train_rows = manifest.splits["train"].num_rows
    cut = count_before_holdout(train_rows, config.holdout_fraction)
    start = cut - min(cut, config.max_train_rows or cut)
    if not config.holdout_fraction:
        return _open(config, manifest, "train", start), _open(config, manifest, "test")
    if cut in (0, train_rows):
        raise ConfigError(
            f"holdout_fraction = {config.holdout_fraction} of {train_rows} rows leaves a part empty"
        )
    return _open(config, manifest, "train", start, cut), _open(config, manifest, "train", cut)


def count_before_holdout(train_rows: int, holdout_fraction: float) -> int:
    """Training rows that are left when the last part of ``train_rows`` is held out."""
    return round(train_rows * (1.0 - holdout_fraction))


def _open(
    config: TrainConfig, manifest: Manifest, split: SplitName, start: int = 0, stop: int | None = None
) -> list[RowGroup]:
    folder = Path(config.dataset.prepared_dir)
    part = manifest.splits.get(split)
    if part is None:
        raise DataError(
            f"{folder} has no {split} part (it was prepared with test_fraction=0): set holdout_fraction to "
            "evaluate on the last training rows, or prepare it with a test part"
        )
    if split == "test" and part.num_positives in (0, part.num_rows):
        raise DataError(f"{folder}: all {part.num_rows} test rows have one label, so no AUC exists for them")
    for file in part.files:
        path = folder / file.path
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise DataError(f"{path} is missing or not the file that was prepared: prepare the data anew")
    return list_row_groups([folder / file.path for file in part.files], start, stop)
