"""Write a click log in Criteo's raw format, drawn from a teacher whose click probabilities are known.

    recsys-basis synthesize
    recsys-basis synthesize output_dir=data/large synthetic.rows=2_000_000 synthetic.cardinality_scale=0.15

Prints the Bayes AUC and log loss of its last part, against which learned ones can be read; they are
also written beside the log, to <log>.truth.json.
"""

from __future__ import annotations

from collections.abc import Sequence

from recsys_basis.cli import run_job
from recsys_basis.config import compose_job
from recsys_basis.ingest.spec import SyntheticConfig
from recsys_basis.ingest.synthetic import synthesize
from recsys_basis.schema import parse_section


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the job; ``arguments`` are Hydra overrides."""
    return run_job("synthesize", lambda overrides: synthesize(parse(overrides)), arguments)


def parse(overrides: list[str]) -> SyntheticConfig:
    """The validated config of configs/synthesize.yaml under ``overrides``."""
    return parse_section(SyntheticConfig, compose_job("synthesize", overrides)["synthetic"], "synthetic")


if __name__ == "__main__":
    raise SystemExit(main())
