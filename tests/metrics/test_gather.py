"""Gathering uneven rows, in two real gloo processes: this file is also what each of them runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recsys_basis.metrics.gather import gather_rows

COUNTS = {"uneven": (3, 5), "first_empty": (0, 2), "last_empty": (4, 0), "all_empty": (0, 0)}
"""Rows of rank 0 and rank 1."""


def _rows_of_rank(rank: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that name their rank and place: logit 100 * rank + place + 0.5, label place mod 2."""
    place = torch.arange(num_rows, dtype=torch.float32)
    return place % 2, 100.0 * rank + place + 0.5


def _run_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    gathered = {}
    for case, counts in COUNTS.items():
        rows = gather_rows(*_rows_of_rank(rank, counts[rank]))
        if rank == 0:
            assert rows is not None
            gathered[case] = torch.stack(rows)
        else:
            assert rows is None
    dist.destroy_process_group()
    if rank == 0:
        torch.save(gathered, folder / "gathered.pt")


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("gather")
    command = [sys.executable, __file__, str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in (0, 1)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    rows: dict[str, torch.Tensor] = torch.load(folder / "gathered.pt", weights_only=True)
    return rows


@pytest.mark.parametrize("case", COUNTS)
def test_every_row_once_in_rank_order(gathered: dict[str, torch.Tensor], case: str) -> None:
    first, second = COUNTS[case]
    logits = [place + 0.5 for place in range(first)] + [100 + place + 0.5 for place in range(second)]
    labels = [place % 2 for place in range(first)] + [place % 2 for place in range(second)]
    assert gathered[case].dtype == torch.float32
    assert gathered[case].tolist() == [labels, logits]


def test_one_rank(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        rows = gather_rows(*_rows_of_rank(0, 3))
    finally:
        dist.destroy_process_group()
    assert rows is not None
    assert rows[0].tolist() == [0.0, 1.0, 0.0]
    assert rows[1].tolist() == [0.5, 1.5, 2.5]


@pytest.mark.parametrize(
    ("labels", "logits", "message"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "float64: both must be float32"),
        (torch.zeros(2, dtype=torch.int8), torch.zeros(2), "int8"),
        (torch.zeros(2), torch.zeros(3), r"labels \[2\], logits \[3\]"),
        (torch.zeros(2, 1), torch.zeros(2, 1), r"labels \[2, 1\]"),
    ],
)
def test_refuses(labels: torch.Tensor, logits: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather_rows(labels, logits)


if __name__ == "__main__":
    _run_rank(int(sys.argv[2]), Path(sys.argv[1]))
