"""What a model's embedding tables cost and where they would go, before any machine is there.

    recsys-basis plan preset=criteo_terabyte_mlperf world_size=64 memory_gb=40
    recsys-basis plan prepared_dir=data/kaggle embedding.embedding_dim=64 row_optimizer=adam
    recsys-basis plan 'cardinalities=[50_000_000,3_000_000,200]' device=cpu world_size=4 memory_gb=64

Prints for each table and in all: bytes of weights, bytes of state of every row optimizer, where TorchRec's
planner would put it under the chosen one; and for every optimizer whether the tables fit, and the fewest
ranks on which they do. Bytes are those of all ranks together, as a run measures them at its end: state is
counted by the rules themselves, with padding, replicas, and what each block of columns has of its own; a
rank's bytes also hold TorchRec's estimate of the buffers of a batch. Needs no GPU, no ranks and none of the
memory it speaks of.
"""

from __future__ import annotations

from collections.abc import Sequence

from recsys_basis.cli import run_job
from recsys_basis.config import compose_job
from recsys_basis.embeddings.collection import create_tables
from recsys_basis.planning.report import print_plan
from recsys_basis.planning.spec import PlanConfig
from recsys_basis.row_optimizers import ROW_OPTIMIZERS, row_optimizer_defaults
from recsys_basis.schema import parse_section
from recsys_basis.training.quiet import silence_known_warnings


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the job; ``arguments`` are Hydra overrides."""
    return run_job("plan", plan, arguments)


def plan(overrides: list[str]) -> None:
    """Compose, validate, plan, print."""
    silence_known_warnings()
    config = parse_section(PlanConfig, compose_job("plan", overrides))
    tables = create_tables(config.embedding, config.ids_by_table())
    chosen = "as configured" if config.table_row_optimizers else config.row_optimizer.rule
    rules = {chosen: config.solved_for_tables(tables)} | {
        name: dict.fromkeys([table.name for table in tables], row_optimizer_defaults(name))
        for name in ROW_OPTIMIZERS
        if name != chosen
    }
    print_plan(config, tables, chosen, rules)


if __name__ == "__main__":
    raise SystemExit(main())
