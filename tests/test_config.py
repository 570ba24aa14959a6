"""Every config file composes and validates; every bad key is refused by name before any work."""

from __future__ import annotations

import pytest

from recsys_basis.comparing.spec import ComparisonConfig, SearchConfig
from recsys_basis.config import compose_job
from recsys_basis.config_folder import config_folder
from recsys_basis.ingest.spec import DatasetConfig
from recsys_basis.schema import ConfigError, parse_section
from recsys_basis.training.spec import TrainConfig

NEEDS = {
    "dataset=criteo_kaggle": ["dataset.raw_paths=[train.txt]"],
    "dataset=criteo_terabyte": ["dataset.raw_paths=[day_0.gz,day_1.gz]"],
}
"""Keys that an option leaves to the user."""


def options(*groups: str) -> list[str]:
    return [
        f"{group}={path.stem}"
        for group in groups
        for path in sorted((config_folder() / group).glob("*.yaml"))
    ]


def train_config(*overrides: str) -> TrainConfig:
    return parse_section(TrainConfig, compose_job("train", overrides))


@pytest.mark.parametrize(
    "option",
    options("dataset", "model", "embedding", "row_optimizer", "row_optimizer/clip")
    + options("dense_optimizer", "schedule", "experiment"),
)
def test_every_option_composes_and_validates(option: str) -> None:
    config = train_config(option, *NEEDS.get(option, []))
    again = parse_section(TrainConfig, config.model_dump())  # what a run saves is whole
    assert again == config


@pytest.mark.parametrize("option", options("comparison"))
def test_every_comparison_composes_and_its_variants_are_trainable(option: str) -> None:
    values = compose_job("compare", [option])
    comparison = parse_section(ComparisonConfig, values.pop("comparison"), where="comparison")
    assert parse_section(TrainConfig, values).output_dir
    for variant in comparison.variants:
        rate = f"{comparison.learning_rate_key}={variant.learning_rates[0]}"
        assert train_config(*variant.overrides, rate)


@pytest.mark.parametrize(
    "override, key",
    [
        ("batch_sise=2", "batch_sise"),
        ("+batch_sise=2", "batch_sise"),
        ("batch_size=0", "batch_size"),
        ("batch_size=many", "batch_size"),
        ("batch_size=2.5", "batch_size"),
        ("epochs=-1", "epochs"),
        ("seed=-1", "seed"),
        ("resume=sometimes", "resume"),
        ("holdout_fraction=1.0", "holdout_fraction"),
        ("max_gradient_norm=0.0", "max_gradient_norm"),
        ("tower_average_decay=1.0", "tower_average_decay"),
        ("tower_average_decay=0.0", "tower_average_decay"),
        ("shuffle_window=-1", "shuffle_window"),
        ("prefetch_batches=-1", "prefetch_batches"),
        ("embedding.min_rows_per_partition=0", "embedding.min_rows_per_partition"),
        ("embedding.initial_scale=-1.0", "embedding.initial_scale"),
        ("checkpoint_every_steps=0", "checkpoint_every_steps"),
        ("checkpoint_keep=0", "checkpoint_keep"),
        ("checkpoint_best_by=rmse", "checkpoint_best_by"),
        ("checkpoint_best_by=auc", "evaluate_every_steps"),
        ("runtime.device=tpu", "runtime.device"),
        ("runtime.threads_per_rank=0", "runtime.threads_per_rank"),
        ("embedding.embedding_dim=0", "embedding.embedding_dim"),
        ("embedding.max_partitions=48", "embedding.max_partitions"),
        ("embedding.pooling=max", "embedding.pooling"),
        ("embedding.kernel=triton", "embedding.kernel"),
        ("embedding.sharding=diagonal", "embedding.sharding"),
        ("embedding.column_shards=3", "column_shards = 3 does not divide embedding_dim = 16"),
        ("embedding.table_sharding={C1: diagonal}", "embedding.table_sharding.C1"),
        ("model.dense_arch=[]", "model.dense_arch"),
        ("model.over_arch=[0,1]", "model.over_arch"),
        ("row_optimizer.learning_rate=-0.1", "row_optimizer.learning_rate"),
        ("row_optimizer.learning_rate=nan", "row_optimizer.learning_rate"),
        ("row_optimizer.beta2=1.0", "row_optimizer.beta2"),
        ("row_optimizer.hash=md5", "row_optimizer.hash"),
        ("+row_optimizer.gamma=1", "row_optimizer.gamma"),
        ("row_optimizer.rule=adamm", "row_optimizer.rule"),
        ("row_optimizer=adamm", "adamm"),
        ("schedule.warmup_steps=-1", "schedule.warmup_steps"),
        ("dataset.min_count=0", "dataset.min_count"),
        ("dataset.test_fraction=2.0", "dataset.test_fraction"),
        ("dense_optimizer.learning_rate=-1.0", "dense_optimizer"),
        ("dense_optimizer.learning_rat=1.0", "learning_rat"),
        ("dataset=criteo_kaggle", "dataset.raw_paths"),
    ],
)
def test_bad_overrides_name_the_key(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_config(override)
    assert key in str(caught.value)


def test_missing_key_is_named() -> None:
    values = compose_job("train", [])
    del values["batch_size"]
    with pytest.raises(ConfigError, match="missing key 'batch_size'"):
        parse_section(TrainConfig, values)


def test_all_bad_keys_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        train_config("batch_size=0", "epochs=0", "+extra=1")
    assert all(key in str(caught.value) for key in ("batch_size", "epochs", "extra"))


def test_prepare_writes_where_output_dir_says() -> None:
    values = compose_job("prepare", ["dataset=kaggle_137k"])
    assert values["output_dir"] == values["dataset"]["prepared_dir"]
    assert parse_section(DatasetConfig, values["dataset"], where="dataset").min_count == 2


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"baseline": "sgd"}, "baseline"),
        ({"seeds": [0, 0]}, "seeds"),
        ({"seeds": []}, "seeds"),
        ({"variants": []}, "variants"),
        ({"parallel_runs": 0}, "parallel_runs"),
        ({"non_inferiority_margin": 0.0}, "non_inferiority_margin"),
        ({"bootstrap_resamples": 10}, "bootstrap_resamples"),
        ({"baseline": "..", "variants": [{"name": "..", "overrides": [], "learning_rates": [0.1]}]}, "name"),
        (
            {"baseline": "a", "variants": [{"name": "a", "overrides": [], "learning_rates": [0.1, 0.1]}]},
            "learning_rates",
        ),
    ],
)
def test_bad_comparisons_are_refused(changes: dict[str, object], reason: str) -> None:
    values = compose_job("compare", [])["comparison"] | changes
    with pytest.raises(ConfigError, match=reason):
        parse_section(ComparisonConfig, values, where="comparison")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy", "random"),
        ("rounds", 1),
        ("seeds", [1, 1]),
        ("holdout_fraction", 0.0),
        ("max_rows", 0),
        ("extensions", -1),
    ],
)
def test_bad_searches_are_refused(key: str, value: object) -> None:
    values = compose_job("compare", [])["comparison"]
    values["search"][key] = value
    with pytest.raises(ConfigError, match=f"comparison.search.{key}"):
        parse_section(ComparisonConfig, values, where="comparison")


def test_rounds_of_halving_grow_to_all_search_rows() -> None:
    values = compose_job("compare", [])["comparison"]["search"]
    halving = parse_section(SearchConfig, values | {"strategy": "halving", "rounds": 3})
    assert halving.rows_of_rounds(1600) == [100, 400, 1600]
    assert parse_section(SearchConfig, values).rows_of_rounds(1600) == [1600]
    with pytest.raises(ConfigError, match="rounds"):
        halving.rows_of_rounds(15)


def test_a_clip_is_chosen_beside_the_rule_and_reaches_it() -> None:
    clip = train_config("row_optimizer=adam", "row_optimizer/clip=cowclip").row_optimizer.clip
    assert clip.cowclip_ratio == 1.0
    assert train_config("row_optimizer.clip.max_norm=0.5").row_optimizer.clip.max_norm == 0.5
