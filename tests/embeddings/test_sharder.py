"""The sharded collection on gloo: 1 and 2 ranks end with the same tensors; TorchRec's private seams."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.embedding import embedding_config
from support.ranks import run_ranks
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType, dtype_to_data_type
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_basis.embeddings.initial import initialize_weights, leave_uninitialized
from recsys_basis.embeddings.kernel import SPEC_KEY, EmbeddingSpec
from recsys_basis.embeddings.plan import plan_sharding
from recsys_basis.embeddings.sharder import RowOptimizerLookup, RowOptimizerSharder
from recsys_basis.embeddings.spec import WeightDtype
from recsys_basis.embeddings.striping import Striping
from recsys_basis.row_optimizers import row_optimizer_defaults
from recsys_basis.row_optimizers.base import RowOptimizerConfig
from recsys_basis.row_optimizers.storage import DTYPES
from recsys_basis.tables import Table
from recsys_basis.training.runtime import Runtime, RuntimeConfig, start_runtime

TABLES = (Table("a", 61, 8, 4), Table("b", 30, 8, 2), Table("c", 5, 8, 1))
RUNTIME = RuntimeConfig(device="cpu", threads_per_rank=1, collective_timeout_s=60)
STEPS, GLOBAL_BATCH = 12, 15
"""An odd batch: two ranks get 7 and 8 rows."""


class Model(torch.nn.Module):
    def __init__(self, embeddings: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embeddings = embeddings
        generator = torch.Generator().manual_seed(3)
        self.tower = torch.nn.Linear(8 * len(TABLES), 1)
        with torch.no_grad():
            self.tower.weight.copy_(torch.randn(self.tower.weight.shape, generator=generator))
            self.tower.bias.zero_()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.embeddings(features).to_dict()  # its order of keys follows the plan
        return self.tower(torch.cat([pooled[table.name] for table in TABLES], dim=1)).squeeze(1)


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [features, rows, 3], how many of them count [features, rows], labels [rows]."""
    generator = torch.Generator().manual_seed(step)
    limits = torch.tensor([table.num_ids for table in TABLES])[:, None, None]
    ids = (torch.rand(len(TABLES), GLOBAL_BATCH, 3, generator=generator) ** 2 * limits).long()
    lengths = torch.randint(0, 4, (len(TABLES), GLOBAL_BATCH), generator=generator)
    return ids, lengths, torch.randint(0, 2, (GLOBAL_BATCH,), generator=generator).float()


def share(step: int, rank: int, world_size: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    ids, lengths, labels = global_batch(step)
    rows = slice(GLOBAL_BATCH * rank // world_size, GLOBAL_BATCH * (rank + 1) // world_size)
    ids, lengths = ids[:, rows], lengths[:, rows]
    values = ids[torch.arange(3) < lengths[:, :, None]]
    features = KeyedJaggedTensor(
        keys=[table.name for table in TABLES], values=values, lengths=lengths.reshape(-1)
    )
    return features, labels[rows]


Case = tuple[Any, ...]
"""Arguments of ``train`` after the runtime."""
"""Row optimizer of each table, sharding, pooling."""


def train_each(cases: dict[str, Case]) -> dict[str, Any]:
    """For each case, all tensors after ``STEPS`` global batches, or the refusal."""
    results: dict[str, Any] = {}
    with start_runtime(RUNTIME) as runtime:
        for name, case in cases.items():
            try:
                results[name] = train(runtime, *case)
            except ValueError as error:
                results[name] = str(error)
    return results


def train(
    runtime: Runtime,
    configs: dict[str, RowOptimizerConfig],
    sharding: str,
    pooling: str,
    weight_dtype: WeightDtype = "float32",
) -> dict[str, torch.Tensor]:
    """Train on ``STEPS`` global batches; full tensors by name, gathered to rank 0."""
    embeddings = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=8,
                num_embeddings=table.num_rows,
                feature_names=[table.name],
                pooling=PoolingType(pooling.upper()),
                data_type=dtype_to_data_type(DTYPES[weight_dtype]),
                init_fn=leave_uninitialized,
            )
            for table in TABLES
        ],
        device=torch.device("meta"),
    )
    sharder = RowOptimizerSharder(
        TABLES,
        {
            name: {SPEC_KEY: EmbeddingSpec(TABLES, config, False, "torch", weight_dtype)}
            for name, config in configs.items()
        },
    )
    module = Model(embeddings)
    blocks = 2 if sharding in ("column_wise", "grid_shard") else 1
    embedding = embedding_config(sharding=sharding, embedding_dim=8, column_shards=blocks)
    plan = plan_sharding(module, sharder, embedding, GLOBAL_BATCH, "cpu")
    kinds = {name: entry.sharding_type for name, entry in plan.plan["embeddings"].items()}
    assert {kinds["a"], kinds["b"]} == {sharding}
    held = {rank for entry in plan.plan["embeddings"].values() for rank in entry.ranks}
    assert held == {*range(runtime.world_size)}
    model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=runtime.device,
        plan=plan,
        sharders=[sharder],
    )
    initialize_weights(model, TABLES, 1.0, seed=5)
    for step in range(STEPS):
        features, labels = share(step, runtime.rank, runtime.world_size)
        model.fused_optimizer.zero_grad()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            model(features), labels, reduction="sum"
        )
        (losses * runtime.world_size / GLOBAL_BATCH).backward()
    return gathered(model)


def gathered(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Every table's weights and state, whole, put together from the parts of all ranks."""
    tensors: dict[str, Any] = {
        key: value.detach() if isinstance(value, torch.nn.Parameter) else value
        for key, value in model.state_dict().items()
        if "embedding_bags" in key
    }
    for entries in model.fused_optimizer.state_dict()["state"].values():
        tensors |= entries
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: parts_of(value) for name, value in tensors.items()})
    full: dict[str, torch.Tensor] = {}
    for of_rank in parts:
        for name, (size, places) in of_rank.items():
            for offsets, part in places:
                whole = full.setdefault(name, torch.full(size, -7, dtype=part.dtype))
                whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return full


def parts_of(value: Any) -> tuple[torch.Size, list[tuple[list[int], torch.Tensor]]]:
    """Size of the whole, and this rank's parts with their offsets."""
    if hasattr(value, "local_shards"):
        places = [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
        return value.size(), places
    return value.shape, [([0] * value.dim(), value.clone())]


RULES = {
    "basis": row_optimizer_defaults("basis", rows_per_bucket=5.0),
    "basis_literal": row_optimizer_defaults("basis_literal", rows_per_bucket=5.0, learning_rate=0.01),
    "basis_head_momentum": row_optimizer_defaults(
        "basis", rows_per_bucket=5.0, direction="head_momentum", head_bucket_share=0.5
    ),
    "adam": row_optimizer_defaults("adam"),
    "partial_rowwise_adam": row_optimizer_defaults("partial_rowwise_adam"),
    "rowwise_adagrad": row_optimizer_defaults("rowwise_adagrad"),
    "adagrad": row_optimizer_defaults("adagrad"),
    "sm3": row_optimizer_defaults("sm3", covers="rows_and_columns"),
    "adafactor": row_optimizer_defaults("adafactor"),
    "count_sketch_adam": row_optimizer_defaults("count_sketch_adam", state_ratio=0.5),
    "sgd": row_optimizer_defaults("sgd"),
    "sgd_cowclip": row_optimizer_defaults(
        "sgd", clip={"max_norm": None, "cowclip_ratio": 0.01, "cowclip_min_norm": 1e-4}
    ),
}


def for_all(rule: str, **overrides: Any) -> dict[str, RowOptimizerConfig]:
    return {table.name: RULES[rule].model_copy(update=overrides) for table in TABLES}


EACH_ITS_OWN = {
    "a": RULES["basis"],
    "b": RULES["adam"],
    "c": row_optimizer_defaults("basis", rows_per_bucket=2.0, scalar="none"),
}

CASES: dict[str, Case] = {
    **{
        f"{rule} {sharding}": (for_all(rule), sharding, "sum")
        for rule in RULES
        for sharding in ("table_wise", "row_wise")
    },
    "each its own table_wise": (EACH_ITS_OWN, "table_wise", "sum"),
    "each its own row_wise": (EACH_ITS_OWN, "row_wise", "sum"),
    "bfloat16 table_wise": (for_all("basis"), "table_wise", "sum", "bfloat16"),
    "bfloat16 row_wise": (for_all("basis"), "row_wise", "sum", "bfloat16"),
    "mean table_wise": (for_all("rowwise_adagrad"), "table_wise", "mean"),
    "mean mixed": (for_all("rowwise_adagrad"), "row_wise", "mean"),  # table c is too small for row-wise
}


COLUMN_CASES: dict[str, Case] = {
    **{
        f"{rule} {sharding}": (for_all(rule), sharding, "sum")
        for rule in ("basis", "basis_literal", "adam", "partial_rowwise_adam")
        for sharding in ("column_wise", "data_parallel")
    },
    "mean column_wise": (for_all("rowwise_adagrad"), "column_wise", "mean"),
    "mean data_parallel": (for_all("rowwise_adagrad"), "data_parallel", "mean"),
    "float16 column_wise": (for_all("adam"), "column_wise", "sum", "float16"),
    "float16 data_parallel": (for_all("adam"), "data_parallel", "sum", "float16"),
    "each its own column_wise": (EACH_ITS_OWN, "column_wise", "sum"),
    "frozen adagrad": (for_all("adagrad", learning_rate=0.0), "table_wise", "sum"),
    "frozen rowwise_adagrad": (for_all("rowwise_adagrad", learning_rate=0.0), "column_wise", "sum"),
}
NODE_CASES: dict[str, Case] = {
    **{
        f"{rule} {sharding}": (for_all(rule), sharding, "sum")
        for rule in ("basis", "adam")
        for sharding in ("table_row_wise", "grid_shard")
    },
    "mean grid_shard": (for_all("adam"), "grid_shard", "mean"),
    "mean table_row_wise": (for_all("adam"), "table_row_wise", "mean"),  # c is too small for it
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(1, train_each, CASES | COLUMN_CASES | NODE_CASES)[0]


@pytest.fixture(scope="module")
def together() -> dict[str, Any]:
    return run_ranks(2, train_each, CASES | COLUMN_CASES)[0]


@pytest.fixture(scope="module")
def two_nodes() -> dict[str, Any]:
    return run_ranks(4, train_each, NODE_CASES, ranks_per_node=2)[0]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Only the order of float32 sums differs (7 + 8 rows, or 15).
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("case", [name for name in CASES | COLUMN_CASES if name != "mean mixed"])
def test_two_ranks_end_with_the_weights_and_state_of_one(
    case: str, alone: dict[str, Any], together: dict[str, Any]
) -> None:
    assert_same(together[case], alone[case])


@pytest.mark.parametrize("case", [name for name in NODE_CASES if "mean" not in name])
def test_two_nodes_of_two_ranks_end_with_the_weights_and_state_of_one_rank(
    case: str, alone: dict[str, Any], two_nodes: dict[str, Any]
) -> None:
    assert_same(two_nodes[case], alone[case])


@pytest.mark.parametrize(
    ("case", "as_in"),
    [
        ("adam column_wise", "adam table_wise"),  # elementwise: columns know nothing of each other
        ("adam grid_shard", "adam table_wise"),
        ("adam table_row_wise", "adam table_wise"),
        ("basis table_row_wise", "basis table_wise"),
        ("basis data_parallel", "basis table_wise"),
        ("partial_rowwise_adam data_parallel", "partial_rowwise_adam table_wise"),
        ("mean data_parallel", "mean table_wise"),
        ("float16 column_wise", "float16 data_parallel"),
    ],
)
def test_one_rank_gets_the_same_by_every_sharding(case: str, as_in: str, alone: dict[str, Any]) -> None:
    assert_same(alone[case], alone[as_in])


def test_a_block_of_columns_keeps_the_row_numbers_of_its_own_columns(together: dict[str, Any]) -> None:
    """With weights that stand still, Adagrad's squares are rowwise Adagrad's before the mean."""
    for table in TABLES:
        squares = together["frozen adagrad"][f"{table.name}.sum_of_squares"]
        by_block = together["frozen rowwise_adagrad"][f"{table.name}.sum_of_squares"]
        torch.testing.assert_close(by_block, squares.view(-1, 2, 4).mean(2))
        assert (by_block > 0).any()


def test_means_that_torchrec_would_compute_wrongly_are_refused(two_nodes: dict[str, Any]) -> None:
    assert "mean pooling under grid_shard" in two_nodes["mean grid_shard"]
    assert (
        "mean pooling" in two_nodes["mean table_row_wise"] and "row-wise" in two_nodes["mean table_row_wise"]
    )


def test_every_rule_ends_elsewhere(alone: dict[str, Any]) -> None:
    weights = [alone[f"{rule} table_wise"]["embeddings.embedding_bags.a.weight"] for rule in RULES]
    for place, weight in enumerate(weights):
        assert not any(torch.equal(weight, other) for other in weights[place + 1 :])


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_each_table_keeps_the_state_of_its_own_rule(sharding: str, together: dict[str, Any]) -> None:
    sizes = {
        name: tuple(value.shape)
        for name, value in together[f"each its own {sharding}"].items()
        if not name.endswith("weight")
    }
    assert sizes == {
        "a.second_moment": (12, 8),  # 4 partitions of 16 rows, 5 a bucket
        "a.updates": (12,),
        "a.energy": (64,),
        "a.table_updates": (1,),
        "b.first_moment": (30, 8),
        "b.second_moment": (30, 8),
        "b.updates": (1,),
        "c.second_moment": (2, 8),
        "c.updates": (2,),
    }


def test_mean_pooling_with_mixed_sharding_is_refused(together: dict[str, Any]) -> None:
    assert "mean pooling" in together["mean mixed"] and "row-wise" in together["mean mixed"]


def test_id_out_of_range_names_the_table() -> None:
    striping = Striping({"x": TABLES[0], "y": TABLES[1]})
    features = KeyedJaggedTensor(
        keys=["x", "y"], values=torch.tensor([60, 0, 30]), lengths=torch.tensor([1, 1, 0, 1])
    )
    with pytest.raises(IndexError, match=r"table b: id 30 .*0\.\.29"):
        striping(features)


def test_torchrec_seams_have_the_signatures_we_override() -> None:
    """Private to torchrec 1.8: a new version must be read before the pin moves."""
    ours = list(inspect.signature(RowOptimizerLookup._create_embedding_kernel).parameters)
    assert ours == list(inspect.signature(GroupedPooledEmbeddingsLookup._create_embedding_kernel).parameters)
    assert list(inspect.signature(ShardedEmbeddingBagCollection._create_lookups).parameters) == ["self"]
    source = inspect.getsource(RwPooledEmbeddingSharding.create_lookup)
    for attribute in ("_grouped_embedding_configs", "_pg", "_device", "_env"):
        assert f"self.{attribute}" in source
