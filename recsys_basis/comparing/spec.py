"""Config of a comparison: the root of configs/compare.yaml."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from recsys_basis.ingest.spec import SyntheticConfig
from recsys_basis.schema import Section

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


class Variant(Section):
    """One contender: the training config under ``overrides``."""

    name: Name
    overrides: Annotated[tuple[str, ...], Field(strict=False)]
    """Hydra overrides of configs/train.yaml, such as row_optimizer=adam."""
    learning_rates: Annotated[tuple[Annotated[float, Field(gt=0.0)], ...], Field(strict=False, min_length=1)]
    """Tried on the holdout part of the training rows; a single one is taken as it is."""

    @field_validator("learning_rates")
    @classmethod
    def _distinct(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if len({f"{rate:g}" for rate in rates}) != len(rates):
            raise ValueError(f"{list(rates)} names a rate twice (to six digits)")
        return rates


class ComparisonConfig(Section):
    """Section ``comparison``; see configs/comparison/*.yaml."""

    baseline: Name
    """Variant that AUC differences are taken to."""
    variants: Annotated[tuple[Variant, ...], Field(strict=False, min_length=1)]
    learning_rate_key: str
    """Config key that ``learning_rates`` are values of."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)]
    """Each variant trains once with each; a seed gives all variants the same initial towers and row order."""
    search_seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)]
    search_holdout_fraction: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Last part of the training rows that judges the search; test rows have no say."""
    search_extensions: Annotated[int, Field(ge=0)]
    """How often a variant's rates may go on by their own ratio while the best one is outermost."""
    parallel_runs: Annotated[int, Field(ge=1)]
    """Runs at a time; the machine's cores are shared among them."""
    synthetic: SyntheticConfig | None
    """Raw clicks to write first where they are missing; null: the dataset's raw files are there."""

    @field_validator("seeds", "search_seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise ValueError(f"{list(seeds)} names a seed twice")
        return seeds

    @model_validator(mode="after")
    def _names_fit(self) -> ComparisonConfig:
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"variants: {', '.join(names)} has a name twice")
        if self.baseline not in names:
            raise ValueError(f"baseline = {self.baseline!r} is none of the variants {', '.join(names)}")
        return self
