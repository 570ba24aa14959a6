"""Config of a comparison: the root of configs/compare.yaml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from recsys_basis.ingest.spec import SyntheticConfig
from recsys_basis.report.comparison import Judging
from recsys_basis.schema import ConfigError, Section

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


def _distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"{list(seeds)} names a seed twice")
    return seeds


Seeds = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1), AfterValidator(_distinct)
]


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


class SearchConfig(Section):
    """Section ``comparison.search``: how each variant finds its learning rate, without the test rows."""

    strategy: Literal["grid", "halving"]
    """grid: every rate trains on all search rows. halving: see ``rounds``."""
    rounds: Annotated[int, Field(ge=2)]
    """Of halving: after each round but the last the better half of a variant's rates, at least two, goes
    on with four times the rows; the last round trains on all search rows."""
    seeds: Seeds
    holdout_fraction: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Last part of the training rows that judges the search; test rows have no say."""
    max_rows: Annotated[int, Field(ge=1)] | None
    """Search rows: at most so many training rows, the last before the holdout; null: all before it."""
    extensions: Annotated[int, Field(ge=0)]
    """How often a variant's rates may go on by their own ratio while the best one is outermost."""

    def rows_of_rounds(self, search_rows: int) -> list[int]:
        """Training rows of each round; raises ConfigError where the first would have none."""
        rounds = self.rounds if self.strategy == "halving" else 1
        rows = [search_rows // 4**later for later in reversed(range(rounds))]
        if rows[0] == 0:
            raise ConfigError(f"comparison.search.rounds = {rounds} leaves its first no row of {search_rows}")
        return rows


class ComparisonConfig(Section):
    """Section ``comparison``; see configs/comparison/*.yaml."""

    baseline: Name
    """Variant that AUC differences are taken to."""
    variants: Annotated[tuple[Variant, ...], Field(strict=False, min_length=1)]
    learning_rate_key: str
    """Config key that ``learning_rates`` are values of."""
    seeds: Seeds
    """Each variant trains once with each; a seed gives all variants the same initial towers and row order."""
    search: SearchConfig
    non_inferiority_margin: Annotated[float, Field(gt=0.0)]
    """AUC that a variant may lose to the baseline and still be called no worse."""
    bootstrap_resamples: Annotated[int, Field(ge=100)]
    parallel_runs: Annotated[int, Field(ge=1)]
    """Runs at a time; the machine's cores are shared among them."""
    synthetic: SyntheticConfig | None
    """Raw clicks to write first where they are missing; null: the dataset's raw files are there."""

    @property
    def judging(self) -> Judging:
        return Judging(self.baseline, self.non_inferiority_margin, self.bootstrap_resamples)

    @model_validator(mode="after")
    def _names_fit(self) -> ComparisonConfig:
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"variants: {', '.join(names)} has a name twice")
        if self.baseline not in names:
            raise ValueError(f"baseline = {self.baseline!r} is none of the variants {', '.join(names)}")
        return self
