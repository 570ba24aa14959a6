"""Every rule and every form of it: a new rule or option enters all contract tests by one line of VARIANTS."""

from __future__ import annotations

import itertools
from typing import Any

SMALL: dict[str, Any] = {"rows_per_bucket": 5.0, "hypergradient_rate": 2.0}


def _basis_variants() -> list[tuple[str, dict[str, Any]]]:
    variants: list[tuple[str, dict[str, Any]]] = []
    for direction, scalar, hash_name in itertools.product(
        ("gradient", "momentum", "head_momentum"),
        ("none", "hypergradient", "energy"),
        ("balanced", "double"),
    ):
        options: dict[str, Any] = {"direction": direction, "scalar": scalar, "hash": hash_name}
        if direction == "head_momentum":
            options["head_bucket_share"] = 0.5
        variants.append(("basis", SMALL | options))
    for options in (
        {"direction": "momentum", "signed": True, "head_rows": 7},
        {"direction": "momentum", "signed": True, "hash": "double"},
        {"scalar": "energy", "energy_decay": 0.9, "energy_start": "first"},
        {"scalar": "energy", "energy_decay": 0.9, "energy_start": "prior", "energy_prior": 0.0},
        {"scalar": "energy", "energy_decay": 0.9, "energy_start": "prior", "energy_prior": 0.3},
        {"scalar": "energy", "energy_decay": 0.9, "energy_correction": "none"},
        {"energy_decay": 1.0, "energy_start": "prior", "energy_prior": 2.0, "hash": "double"},
        {"scalar": "hypergradient", "hypergradient_form": "log", "signed": True},
        {"scalar": "hypergradient", "hypergradient_normalized": True},
        {"scalar": "hypergradient", "hypergradient_by_frequency": True, "direction": "momentum"},
        {"rows_per_bucket": 1.0, "head_bucket_share": 1.0, "direction": "head_momentum"},
        {"rows_per_bucket": 1e6},
        {"head_rows": 1000000, "direction": "head_momentum"},
        {"hash": "murmur3", "hash_seed": 3},
        {"hash": "modulo"},
        {"moment_dtype": "bfloat16", "scalar_dtype": "log8"},
        {"moment_dtype": "float16", "eps": 0.01, "direction": "momentum", "hash": "double"},
        {"moment_dtype": "bfloat16", "scalar_dtype": "float16", "scalar": "hypergradient"},
        {"moment_dtype": "bfloat16", "direction": "head_momentum", "head_bucket_share": 0.5},
    ):
        variants.append(("basis", SMALL | options))
    return variants


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("adam", "partial_rowwise_adam", "rowwise_adagrad", "adagrad", "sgd")),
    ("sm3", {}),
    ("sm3", {"covers": "rows_and_columns"}),
    ("adafactor", {}),
    ("adafactor", {"beta2": 0.9, "update_clip": 0.5}),
    ("count_sketch_adam", {}),
    ("count_sketch_adam", {"beta1": 0.0, "state_ratio": 0.6, "hash_seed": 3}),
    ("basis", {}),
    ("basis_literal", {}),
    *_basis_variants(),
]
IDS = [" ".join((name, *(f"{key}={value}" for key, value in options.items()))) for name, options in VARIANTS]
