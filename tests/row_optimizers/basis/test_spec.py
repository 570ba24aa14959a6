"""Bounds of the section ``row_optimizer`` for BASIS: a bad value is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest

from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.row_optimizers.basis import BasisConfig
from recsys_basis.schema import ConfigError


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", float("nan")),
        ("learning_rate", "0.1"),
        ("weight_decay", -1.0),
        ("direction", "sideways"),
        ("scalar", True),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("eps", 0.0),
        ("energy_decay", 0.0),
        ("energy_decay", 1.1),
        ("energy_start", "second"),
        ("hypergradient_rate", -1.0),
        ("hypergradient_form", "cubic"),
        ("hypergradient_normalized", "yes"),
        ("hypergradient_by_frequency", 1),
        ("scalar_min", 0.0),
        ("scalar_min", 1.5),
        ("scalar_max", 0.5),
        ("rows_per_bucket", 0.5),
        ("bucket_rows", 0),
        ("bucket_rows", 2.5),
        ("state_budget", 200),
        ("state_budget", "200"),
        ("state_budget", "-1MB"),
        ("state_budget", "two %"),
        ("grow_at", [0]),
        ("grow_at", 5),
        ("head_rows", -1),
        ("head_rows", 2.5),
        ("head_bucket_share", 1.5),
        ("hash", "md5"),
        ("hash_seed", -1),
        ("moment_dtype", "log8"),
        ("scalar_dtype", "int8"),
        ("signed", 0),
        ("signd", True),
    ],
)
def test_a_bad_value_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"row_optimizer\.{key}\b"):
        row_optimizer_defaults("basis", **{key: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grow_at": [5, 3]}, ["grow_at = [5, 3]", "ascend"]),
        ({"grow_at": [3, 3]}, ["grow_at = [3, 3]", "ascend"]),
        ({"bucket_rows": 5}, ["rows_per_bucket", "bucket_rows", "state_budget"]),
        ({"state_budget": "2%"}, ["rows_per_bucket", "bucket_rows", "state_budget"]),
        ({"rows_per_bucket": None}, ["rows_per_bucket", "bucket_rows", "state_budget"]),
        ({"head_rows": 5, "head_bucket_share": 0.5}, ["head_rows", "head_bucket_share"]),
        ({"direction": "head_momentum"}, ["head_rows", "head_bucket_share"]),
        ({"signed": True}, ["signed", "momentum", "hypergradient"]),
        ({"moment_dtype": "float16"}, ["eps", "moment_dtype = float16", "bfloat16"]),
        ({"scalar_dtype": "float16"}, ["scalar_dtype = float16", "energy", "log8"]),
        ({"scalar_dtype": "log8", "scalar": "hypergradient"}, ["scalar_dtype = log8", "26 %", "bfloat16"]),
    ],
)
def test_combinations_that_mean_nothing_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        row_optimizer_defaults("basis", **options)
    assert all(word in str(refusal.value) for word in words)


def test_literal_preset_is_the_design_documents() -> None:
    """Momentum, hypergradient, s in [0.1, 10], beta 0.9/0.999, eta_s = 1e-4 eta, murmur3, N/K = 100."""
    config = row_optimizer_defaults("basis_literal")
    assert isinstance(config, BasisConfig)
    assert (config.direction, config.scalar, config.hash) == ("momentum", "hypergradient", "murmur3")
    assert (config.scalar_min, config.scalar_max, config.hypergradient_rate) == (0.1, 10.0, 1e-4)
    assert (config.beta1, config.beta2, config.rows_per_bucket) == (0.9, 0.999, 100.0)
    assert config.hypergradient_form == "linear"
    assert not (config.hypergradient_normalized or config.hypergradient_by_frequency or config.signed)
