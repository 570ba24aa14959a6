"""Models from config: the same towers for a seed, the papers' functions, widths that must fit."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_basis.models import ModelConfig, create_model
from recsys_basis.schema import ConfigError, parse_section

FEATURES, WIDTH, BATCH = 3, 4, 5


def model_config(**changes: object) -> ModelConfig:
    values = {
        "name": "dlrm",
        "dense_arch": [6, WIDTH],
        "over_arch": [7, 1],
        "cross_layers": 0,
        "cross_rank": 0,
    }
    return parse_section(ModelConfig, values | changes, where="model")


def embeddings() -> EmbeddingBagCollection:
    torch.manual_seed(1)
    names = [f"C{place}" for place in range(FEATURES)]
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=9, feature_names=[name])
        for name in names
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))


def inputs() -> tuple[torch.Tensor, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 9, (FEATURES * BATCH,), generator=generator)
    keys = [f"C{place}" for place in range(FEATURES)]
    features = KeyedJaggedTensor(
        keys=keys, values=ids, lengths=torch.ones(FEATURES * BATCH, dtype=torch.int32)
    )
    return torch.randn(BATCH, 2, generator=generator), features


def tower(
    weights: dict[str, torch.Tensor], prefix: str, x: torch.Tensor, last_is_linear: bool
) -> torch.Tensor:
    layers = [
        key.removesuffix(".weight") for key in weights if key.startswith(prefix) and key.endswith(".weight")
    ]
    for place, layer in enumerate(layers):
        x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        if not (last_is_linear and place == len(layers) - 1):
            x = x.clamp(min=0)
    return x


def test_dlrm_is_the_paper_s_formula() -> None:
    collection = embeddings()
    model = create_model(model_config(), collection, num_dense=2, seed=0)
    dense, features = inputs()
    weights = {key: value.double() for key, value in model.state_dict().items()}
    bottom = tower(weights, "dense_arch", dense.double(), last_is_linear=False)
    ids = features.values().view(FEATURES, BATCH)
    tables = [
        weights[f"sparse_arch.embedding_bag_collection.embedding_bags.C{place}.weight"]
        for place in range(FEATURES)
    ]
    vectors = torch.stack([bottom] + [table[rows] for table, rows in zip(tables, ids, strict=True)], dim=1)
    products = vectors @ vectors.transpose(1, 2)
    above = torch.triu_indices(FEATURES + 1, FEATURES + 1, offset=1)
    pairs = products[:, above[0], above[1]]
    expected = tower(weights, "over_arch", torch.cat([bottom, pairs], dim=1), last_is_linear=True)
    torch.testing.assert_close(model(dense, features).double(), expected, rtol=1e-5, atol=1e-6)


def test_dcnv2_crosses_as_the_paper_says() -> None:
    config = model_config(name="dcnv2", cross_layers=2, cross_rank=3)
    model = create_model(config, embeddings(), num_dense=2, seed=0)
    dense, features = inputs()
    weights = {key: value.double() for key, value in model.state_dict().items()}
    bottom = tower(weights, "dense_arch", dense.double(), last_is_linear=False)
    ids = features.values().view(FEATURES, BATCH)
    tables = [
        weights[f"sparse_arch.embedding_bag_collection.embedding_bags.C{place}.weight"]
        for place in range(FEATURES)
    ]
    first = torch.cat([bottom] + [table[rows] for table, rows in zip(tables, ids, strict=True)], dim=1)
    x = first
    for layer in range(2):  # x' = x0 * (W (V x) + b) + x
        v = weights[f"inter_arch.crossnet.V_kernels.{layer}"]
        w = weights[f"inter_arch.crossnet.W_kernels.{layer}"]
        x = first * (x @ v.T @ w.T + weights[f"inter_arch.crossnet.bias.{layer}"]) + x
    expected = tower(weights, "over_arch", x, last_is_linear=True)
    torch.testing.assert_close(model(dense, features).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"name": "dcnv2", "cross_layers": 2, "cross_rank": 3}])
def test_seed_decides_the_towers_and_leaves_torch_s_generator_alone(changes: dict[str, object]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    towers = []
    for seed in (0, 0, 1):
        collection = embeddings()
        torch.set_rng_state(before)
        state = create_model(model_config(**changes), collection, 2, seed).state_dict()
        assert torch.equal(torch.get_rng_state(), before)
        towers.append(
            torch.cat([value.flatten() for key, value in state.items() if "embedding_bag" not in key])
        )
    assert torch.equal(towers[0], towers[1]) and not torch.equal(towers[0], towers[2])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dense_arch": [6, 5]}, "dense_arch"),
        ({"over_arch": [7, 2]}, "over_arch"),
        ({"cross_layers": 2}, "cross_layers"),
        ({"cross_rank": 2}, "cross_rank"),
        ({"name": "dcnv2"}, "cross_layers"),
        ({"name": "dcnv2", "cross_layers": 1}, "cross_rank"),
    ],
)
def test_widths_that_do_not_fit_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create_model(model_config(**changes), embeddings(), 2, 0)
