"""Config sections of the data: where raw clicks come from and how they are prepared.

Both raw formats have the same 40 tab-separated columns (``columns.py``) and are read alike.
They differ in what they hold, and the name is kept in the manifest:

criteo_kaggle    one file of 7 days (45.8 million lines), negative samples thinned so that about
                 26 % of the rows are clicks; of the integer columns only I2 goes negative.
criteo_terabyte  24 files, one a day (4.4 billion lines), thinned differently (about 3 % clicks);
                 other integer columns go negative too; ids come from another hash, so that
                 vocabularies of the two formats do not mix.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from recsys_basis.schema import Section

PathText = Annotated[str, Field(min_length=1)]


class DatasetConfig(Section):
    """One raw data set and its preparation."""

    format: Literal["criteo_kaggle", "criteo_terabyte"]
    raw_paths: Annotated[tuple[PathText, ...], Field(strict=False, min_length=1)]
    """Raw files in time order, plain or .gz; a single path may stand alone."""
    prepared_dir: PathText
    """Folder that the preparation writes."""
    vocabulary_from: PathText | None
    """Prepared folder whose vocabulary and integer shifts are reused (for later files of the
    same log), or null to fit them on this training part."""
    min_count: Annotated[int, Field(ge=1)]
    """Values seen less often than this in the training part are rare and share id 0."""
    test_fraction: Annotated[float, Field(ge=0.0, lt=1.0)]
    """The last round(rows * test_fraction) rows are the test part; 0 makes none."""
    on_bad_line: Literal["error", "skip", "pad"]
    """error: stop at the first bad line. skip: leave bad lines out and count them by kind.
    pad: give short lines back their trailing empty fields; any other fault stops."""
    overwrite: bool
    """Whether an existing prepared folder is replaced (once the new one is complete)."""
    row_group_rows: Annotated[int, Field(ge=1, le=2**24)]
    """Rows of one Parquet row group, the unit that readers shuffle and split over ranks."""

    @field_validator("raw_paths", mode="before")
    @classmethod
    def _one_path_may_stand_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("raw_paths")
    @classmethod
    def _each_file_once(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        repeated = [path for path in paths if paths.count(path) > 1]
        if repeated:
            raise ValueError(f"{repeated[0]} is named more than once")
        return paths


class SyntheticConfig(Section):
    """Synthetic clicks in the Criteo format, drawn from a teacher with known probabilities."""

    path: PathText
    """Raw file to write; compressed when the name ends in .gz. The truth goes beside it."""
    rows: Annotated[int, Field(ge=100)]
    seed: Annotated[int, Field(ge=0)]
    """Seed of the teacher and of all draws; the same file for the same config."""
    zipf_exponent: Annotated[float, Field(gt=0.0)]
    """Value of rank k of a column is drawn with probability ~ k ** -zipf_exponent."""
    cardinality_scale: Annotated[float, Field(gt=0.0, le=10.0)]
    """Factor on the cardinalities of the full Criteo Kaggle set (33.8 million values)."""
    click_rate: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Mean click probability."""
    value_effect: Annotated[float, Field(ge=0.0)]
    """Standard deviation of the logit due to single categorical values."""
    pair_effect: Annotated[float, Field(ge=0.0)]
    """Standard deviation of the logit due to pairs of categorical values."""
    integer_effect: Annotated[float, Field(ge=0.0)]
    """Standard deviation of the logit due to the integer columns."""
    pair_rank: Annotated[int, Field(ge=1)]
    """Rank of the pair interactions: length of the hidden vector of a value."""
    num_pairs: Annotated[int, Field(ge=1, le=325)]
    """How many of the 325 pairs of categorical columns interact."""
    test_fraction: Annotated[float, Field(gt=0.0, lt=1.0)]
    """The Bayes AUC and log loss are those of the last round(rows * test_fraction) rows."""
    overwrite: bool
    """Whether an existing file is replaced (once the new one is complete)."""
