"""Numbers of ids to tables, tables to TorchRec's EmbeddingBagCollection, before any memory is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType, dtype_to_data_type
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recsys_basis.embeddings.features import Pooling
from recsys_basis.embeddings.initial import leave_uninitialized
from recsys_basis.embeddings.spec import EmbeddingConfig, WeightDtype
from recsys_basis.row_optimizers.storage import DTYPES
from recsys_basis.tables import Table, count_partitions


def create_tables(embedding: EmbeddingConfig, cardinalities: Mapping[str, int]) -> tuple[Table, ...]:
    """One table for each column of ``cardinalities``, which maps its name to its number of ids."""
    return tuple(
        Table(
            name=column,
            num_ids=num_ids,
            embedding_dim=embedding.embedding_dim,
            num_partitions=count_partitions(
                num_ids, embedding.max_partitions, embedding.min_rows_per_partition
            ),
        )
        for column, num_ids in cardinalities.items()
    )


def create_collection(
    tables: Sequence[Table], pooling: Pooling, weight_dtype: WeightDtype
) -> EmbeddingBagCollection:
    """One feature for each table, of its name; on the meta device, since a rank may not hold whole tables."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=table.embedding_dim,
                num_embeddings=table.num_rows,
                feature_names=[table.name],
                pooling=PoolingType(pooling.upper()),
                data_type=dtype_to_data_type(DTYPES[weight_dtype]),
                init_fn=leave_uninitialized,
            )
            for table in tables
        ],
        device=torch.device("meta"),
    )
