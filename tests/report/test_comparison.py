"""From runs to rows: means, costs, pairing, and the comparisons that must be refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from recsys_basis.metrics.paired import PairedComponents, bootstrap_interval, delong_interval
from recsys_basis.report.comparison import BOOTSTRAP_SEED, Judging, RunsDifferError, compare_runs
from recsys_basis.report.records import RunRecord, write_predictions

MakeRun = Callable[..., RunRecord]
JUDGING = Judging("adam", margin=0.0005, num_resamples=200)


def _both(finished_run: MakeRun, seeds: tuple[int, ...] = (0, 1, 2)) -> list[RunRecord]:
    """Runs of adam and of a weaker, smaller basis, seeds out of order."""
    return [
        finished_run(variant, seed, strength=strength, optimizer_bytes=size)
        for seed in reversed(seeds)
        for variant, strength, size in (("basis", 0.9, 97_000), ("adam", 1.0, 9_700_000))
    ]


def test_means_and_costs(finished_run: MakeRun) -> None:
    records = _both(finished_run)
    basis, adam = compare_runs(records, JUDGING)
    assert (basis.variant, adam.variant) == ("basis", "adam")
    assert basis.seeds == (0, 1, 2)
    aucs = [roc_auc_score(*record.predictions()) for record in records if record.variant == "basis"]
    assert basis.auc_mean == pytest.approx(np.mean(aucs))
    assert basis.auc_std == pytest.approx(np.std(aucs, ddof=1))
    for mean, name in (
        (basis.log_loss_mean, "log_loss"),
        (basis.ne_mean, "normalized_entropy"),
        (basis.calibration_mean, "calibration"),
    ):
        values = [getattr(record.metrics, name) for record in records if record.variant == "basis"]
        assert mean == pytest.approx(np.mean(values))
    assert (basis.optimizer_bytes, adam.optimizer_bytes) == (97_000, 9_700_000)
    assert (basis.dense_optimizer_bytes, basis.weight_bytes) == (12_000, 4_850_000)
    assert basis.rows_per_second == pytest.approx(31_000.0)
    assert basis.peak_memory_bytes == 900_000_002
    assert basis.loss_jitter_mean == pytest.approx(0.04)
    assert (basis.learning_rate, basis.num_test_rows) == (0.006, 400)


def test_differences_are_paired_by_seed_and_to_the_baseline(finished_run: MakeRun) -> None:
    records = _both(finished_run)
    basis, adam = compare_runs(records, JUDGING)
    logits = {(record.variant, record.seed): record.predictions()[1] for record in records}
    components = PairedComponents.of(
        records[0].predictions()[0],
        np.stack([logits["basis", seed] for seed in (0, 1, 2)]),
        np.stack([logits["adam", seed] for seed in (0, 1, 2)]),
    )
    expected = delong_interval(components)
    assert basis.auc_difference == expected.difference < 0
    assert basis.auc_difference == pytest.approx(basis.auc_mean - adam.auc_mean)
    assert (basis.delong_ci_low, basis.delong_ci_high) == (expected.ci_low, expected.ci_high)
    assert (basis.ci_low, basis.ci_high) == bootstrap_interval(components, 200, BOOTSTRAP_SEED)
    assert basis.seed_differences == expected.by_seed
    assert basis.seed_standard_errors == expected.seed_standard_errors
    assert (basis.standard_error_rows, basis.standard_error_seeds) == (
        expected.standard_error_rows,
        expected.standard_error_seeds,
    )
    assert basis.paired_seeds == (0, 1, 2)
    assert (adam.auc_difference, adam.ci_low, adam.ci_high, adam.paired_seeds) == (None, None, None, ())
    assert (adam.delong_ci_low, adam.non_inferior, adam.seed_differences) == (None, None, ())


def test_no_worse_is_the_lower_end_above_the_margin(finished_run: MakeRun) -> None:
    records = _both(finished_run)
    basis, _ = compare_runs(records, JUDGING)
    assert basis.ci_low is not None and basis.delong_ci_low is not None
    ends = sorted([-basis.ci_low, -basis.delong_ci_low])
    assert 0 < ends[0] < ends[1]
    for margin, bootstrap, delong in (
        (ends[0] * 0.999, False, False),
        (sum(ends) / 2, -basis.ci_low == ends[0], -basis.delong_ci_low == ends[0]),
        (ends[1] * 1.001, True, True),
    ):
        judged, _ = compare_runs(records, dataclasses.replace(JUDGING, margin=margin))
        assert (judged.non_inferior, judged.delong_non_inferior) == (bootstrap, delong)


def test_one_seed_has_no_spread(finished_run: MakeRun) -> None:
    basis, _ = compare_runs(_both(finished_run, seeds=(5,)), JUDGING)
    assert basis.auc_std is None
    assert basis.standard_error_seeds is None
    assert basis.ci_low is not None


def test_without_the_baseline_there_is_a_warning_and_no_difference(
    finished_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    rows = compare_runs([finished_run("basis", 0), finished_run("sgd", 0, optimizer_bytes=0)], JUDGING)
    assert [row.auc_difference for row in rows] == [None, None]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no runs of the baseline 'adam'" in caplog.text


@pytest.mark.parametrize(("seeds", "shared"), [((0, 1), (1,)), ((7,), ())])
def test_only_shared_seeds_are_paired(
    finished_run: MakeRun, caplog: pytest.LogCaptureFixture, seeds: tuple[int, ...], shared: tuple[int, ...]
) -> None:
    records = [finished_run("adam", seed) for seed in (1, 2)] + [
        finished_run("basis", seed) for seed in seeds
    ]
    _, basis = compare_runs(records, JUDGING)
    assert basis.paired_seeds == shared
    assert (basis.auc_difference is None) == (not shared)
    assert f"their AUC difference is over {list(shared)} only" in caplog.text


def test_no_worse_is_not_claimed_where_seeds_are_missing(finished_run: MakeRun) -> None:
    """Of runs that diverged nothing is known, whether the variant's or the baseline's."""
    generous = dataclasses.replace(JUDGING, margin=1.0)
    runs = {name: [finished_run(name, seed) for seed in (0, 1, 2)] for name in ("adam", "basis", "sgd")}
    every = [run for of_variant in runs.values() for run in of_variant]
    _, basis, _ = compare_runs(every, generous)
    assert (basis.missing_seeds, basis.non_inferior, basis.delong_non_inferior) == ((), True, True)
    for gone, missing, claimed in (
        (runs["basis"][1], [(1,), ()], [False, True]),
        (runs["adam"][1], [(1,), (1,)], [False, False]),
    ):
        _, *rows = compare_runs([run for run in every if run is not gone], generous)
        assert [row.missing_seeds for row in rows] == missing
        assert [row.non_inferior for row in rows] == [row.delong_non_inferior for row in rows] == claimed
    left = [run for run in every if run not in (runs["basis"][1], runs["adam"][1])]
    assert compare_runs(left, generous)[1].missing_seeds == (1,)  # sgd shows that there was one


def test_speed_that_was_not_measured_is_left_out(finished_run: MakeRun) -> None:
    records = [finished_run("adam", 0, rows_per_second=None), finished_run("adam", 1)]
    assert compare_runs(records, JUDGING)[0].rows_per_second == 31_000.0
    assert compare_runs(records[:1], JUDGING)[0].rows_per_second is None


def test_other_test_rows_are_refused(finished_run: MakeRun) -> None:
    records = _both(finished_run)
    labels, logits = records[3].predictions()
    labels = labels.copy()
    labels[[0, 1]] = labels[[1, 0]]  # as many rows, as many clicks, in another order
    write_predictions(records[3].run_dir, labels, logits)
    with pytest.raises(RunsDifferError, match=f"{records[3].run_dir}.*not evaluated on the same test rows"):
        compare_runs(records, JUDGING)
    write_predictions(records[3].run_dir, labels[2:], logits[2:])
    with pytest.raises(RunsDifferError, match=r"400 test rows.*398 rows"):
        compare_runs(records, JUDGING)


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 0.003), ("optimizer_bytes", 1), ("dense_optimizer_bytes", 1), ("weight_bytes", 1)],
)
def test_runs_of_a_variant_that_are_not_alike_are_refused(
    finished_run: MakeRun, field: str, value: float
) -> None:
    records = [finished_run("adam", 0), finished_run("adam", 1, **{field: value})]
    with pytest.raises(RunsDifferError, match=f"variant adam has runs of different {field}: .* in .*adam-1"):
        compare_runs(records, JUDGING)


def test_a_seed_twice_is_refused(finished_run: MakeRun) -> None:
    record = finished_run("adam", 3)
    with pytest.raises(RunsDifferError, match="variant adam has seed 3 twice"):
        compare_runs([record, dataclasses.replace(record)], JUDGING)


def test_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="no finished runs"):
        compare_runs([], JUDGING)
