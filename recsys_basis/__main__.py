"""``python -m recsys_basis JOB``: the console script, without its being on PATH."""

from recsys_basis.cli import main

raise SystemExit(main())
