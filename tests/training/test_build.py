"""The model as built from its config: each table's kernel under its own row optimizer."""

from __future__ import annotations

from pathlib import Path

from support.tiny import tiny_config

from recsys_basis.ingest.manifest import Manifest
from recsys_basis.training.build import build
from recsys_basis.training.runtime import start_runtime

BY_TWO = "{base: basis, rows_per_bucket: 2}"
MIXED = f"table_row_optimizers={{C3: {{base: adam, learning_rate: 0.25}}, C12: {BY_TWO}, C20: {BY_TWO}}}"


def test_tables_of_one_row_optimizer_share_a_kernel_and_the_schedule_scales_each(prepared: Path) -> None:
    config = tiny_config(
        prepared, Path("unused"), MIXED, "row_optimizer.learning_rate=0.5", "schedule=linear"
    )
    with start_runtime(config.runtime) as runtime:
        trainable = build(config, Manifest.load(prepared), runtime)
        kernels = {
            tuple(sorted(shard.table.name for shard in bags.row_optimizer.shards)): bags
            for bags in trainable.embedding_bags()
        }
        adam, apart = ("C3",), ("C12", "C20")
        assert config.table_row_optimizers is not None
        assert len(kernels) == 3 and sum(map(len, kernels)) == 26
        assert kernels[adam].row_optimizer.config.rule == "adam"
        assert kernels[apart].row_optimizer.config == config.table_row_optimizers["C20"]
        (rest,) = (bags for names, bags in kernels.items() if names not in (adam, apart))
        assert rest.row_optimizer.config == config.row_optimizer
        for step, factor in ((0, 1.0), (5, 0.5)):
            assert trainable.start_step(step, 10) == factor
            rates = [bags.learning_rate for bags in (kernels[adam], kernels[apart], rest)]
            assert rates == [0.25 * factor, 0.004 * factor, 0.5 * factor]
