"""The towers' average against the formula, and that evaluation uses it and training does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from support.tiny import tiny_config

from recsys_basis.training.averaging import TowerAverage
from recsys_basis.training.loop import run_training


def test_average_follows_the_formula_from_the_first_weights_on() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    average = TowerAverage([("w", parameter)], decay=0.9)
    expected = parameter.detach().double().clone()
    for step in range(20):
        with torch.no_grad():
            parameter += step * 0.1
        average.update()
        expected = 0.9 * expected + 0.1 * parameter.detach().double()
    torch.testing.assert_close(average.state["w"].double(), expected, rtol=1e-6, atol=0)


def test_averages_stand_in_and_leave_again() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    average = TowerAverage([("w", parameter)], decay=0.5)
    with torch.no_grad():
        parameter += 2.0
    average.update()
    try:
        with average.in_place():
            assert parameter.item() == 2.0
            raise KeyError
    except KeyError:
        pass
    assert parameter.item() == 3.0 and average.state["w"].item() == 2.0


def test_evaluation_uses_the_average_and_training_does_not(prepared: Path, tmp_path: Path) -> None:
    plain = run_training(tiny_config(prepared, tmp_path / "plain"))
    averaged = run_training(tiny_config(prepared, tmp_path / "averaged", "tower_average_decay=0.9"))
    assert plain is not None and averaged is not None
    losses = [
        pq.read_table(tmp_path / name / "test_predictions.parquet")["logit"].to_numpy()
        for name in ("plain", "averaged")
    ]
    assert not np.array_equal(*losses)
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("plain", "averaged")]
    trained = [[line.split('"rows_per_second"')[0] for line in log if '"train"' in line] for log in logs]
    assert trained[0] == trained[1] and len(trained[0]) == 5
