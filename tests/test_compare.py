"""A comparison plans the right runs, refuses what it would overwrite, and ends in its four files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recsys_basis.compare import RunPlanner, compare, only_user_of
from recsys_basis.comparing.spec import ComparisonConfig
from recsys_basis.config import compose_job
from recsys_basis.schema import ConfigError, parse_section

SMALL = [
    "batch_size=128",
    "embedding.embedding_dim=8",
    "model.dense_arch=[16,8]",
    "model.over_arch=[16,1]",
    "dataset.row_group_rows=500",
    "comparison.seeds=[3,4]",
    "comparison.search.seeds=[0]",
    "comparison.search.extensions=0",
    "comparison.bootstrap_resamples=200",
]


def small(prepared: Path, folder: Path) -> list[str]:
    raw = prepared.parent / "clicks.tsv.gz"
    return [*SMALL, f"dataset.prepared_dir={prepared}", f"dataset.raw_paths=[{raw}]", f"output_dir={folder}"]


def planner(overrides: list[str]) -> RunPlanner:
    values = compose_job("compare", overrides)
    comparison = parse_section(ComparisonConfig, values["comparison"], where="comparison")
    return RunPlanner(comparison, overrides, Path(values["output_dir"]))


def test_runs_differ_in_variant_rate_and_seed_alone(prepared: Path, tmp_path: Path) -> None:
    plan = planner(small(prepared, tmp_path))
    runs = plan.final({"adam": 0.004, "basis": 0.04, "rowwise_adagrad": 0.02, "basis_literal": 0.001})
    assert [(run.variant, run.config.seed) for run in runs[:5]] == [
        ("adam", 3), ("basis", 3), ("rowwise_adagrad", 3), ("basis_literal", 3), ("adam", 4),
    ]  # fmt: skip
    assert {run.config.row_optimizer.learning_rate for run in runs} == {0.004, 0.04, 0.02, 0.001}
    assert all(run.config.holdout_fraction == 0.0 for run in runs)
    own = {"row_optimizer", "seed", "output_dir"}
    assert len({run.config.model_copy(update=dict.fromkeys(own)).model_dump_json() for run in runs}) == 1
    assert len({run.folder for run in runs}) == len(runs)


def test_a_variant_may_give_one_table_another_rule(prepared: Path, tmp_path: Path) -> None:
    plan = planner([*small(prepared, tmp_path), "+table_row_optimizers.C1=sgd"])
    adam, basis, *_ = plan.comparison.variants
    moved = basis.model_copy(update={"overrides": (*basis.overrides, "+table_row_optimizers.C3=adam")})
    tables = [plan.config(each, 0.1, 0, "final").table_row_optimizers for each in (adam, moved)]
    assert [list(each or {}) for each in tables] == [["C1"], ["C1", "C3"]]


APART = "+table_row_optimizers={C3: {base: adam, learning_rate: 0.03}, C1?: sgd}"


def test_rates_of_tables_set_apart_stay_and_are_told(prepared: Path, tmp_path: Path) -> None:
    plan = planner(small(prepared, tmp_path))
    plain = plan.comparison.variants[1]
    apart = plain.model_copy(update={"overrides": (*plain.overrides, APART)})
    low, high = (plan.config(apart, rate, 0, "search") for rate in (0.1, 0.2))
    assert low.table_row_optimizers == high.table_row_optimizers
    assert low.row_optimizer.learning_rate != high.row_optimizer.learning_rate
    key = plan.comparison.learning_rate_key
    words = f"basis varies {key} alone: tables set apart keep their rates, C3 0.03, C1? 1"
    assert plan.fixed_rates(apart) == words
    assert plan.fixed_rates(plain) == ""
    common = APART.replace("0.03", f"${{{key}}}").replace(", C1?: sgd", "")
    follows = plain.model_copy(update={"overrides": (*plain.overrides, common)})
    assert plan.fixed_rates(follows) == ""


def test_the_rate_of_a_table_set_apart_can_be_searched(prepared: Path, tmp_path: Path) -> None:
    key = "table_row_optimizers.C3.learning_rate"
    plan = planner([*small(prepared, tmp_path), f"comparison.learning_rate_key={key}"])
    variant = plan.comparison.variants[1]
    apart = variant.model_copy(update={"overrides": (*variant.overrides, APART.replace(", C1?: sgd", ""))})
    config = plan.config(apart, 0.2, 0, "search")
    assert config.table_row_optimizers is not None
    assert config.table_row_optimizers["C3"].learning_rate == 0.2
    assert plan.fixed_rates(apart) == ""


def test_a_table_that_is_not_there_shows_before_the_first_run(prepared: Path, tmp_path: Path) -> None:
    base = "{name: adam, overrides: ['row_optimizer=adam'], learning_rates: [0.1]}"
    other = "{name: other, overrides: ['+table_row_optimizers.C27=sgd'], learning_rates: [0.1]}"
    with pytest.raises(ConfigError, match=r"table_row_optimizers\.C27 names no table"):
        compare([*small(prepared, tmp_path), f"comparison.variants=[{base},{other}]"])
    assert not (tmp_path / "runs").exists()


def test_the_search_never_sees_the_test_rows(prepared: Path, tmp_path: Path) -> None:
    plan = planner(small(prepared, tmp_path))
    adam = plan.comparison.variants[0]
    (run,) = plan.search([(adam, 0.5)], 700)
    assert run.config.holdout_fraction == plan.comparison.search.holdout_fraction > 0
    assert run.config.max_train_rows == 700
    (shorter,) = plan.search([(adam, 0.5)], 70)
    assert shorter.folder != run.folder
    assert run.config.row_optimizer.learning_rate == run.learning_rate == 0.5


@pytest.mark.parametrize(
    "override",
    ["seed=7", "holdout_fraction=0.3", "runtime.threads_per_rank=8", "row_optimizer.learning_rate=0.5"],
)
def test_keys_that_the_comparison_sets_are_refused(override: str, prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        compare([*small(prepared, tmp_path), override])


@pytest.mark.parametrize("override", ["dataset.min_count=5", "max_train_rows=5"])
def test_variants_share_the_data(override: str, prepared: Path, tmp_path: Path) -> None:
    variant = f"{{name: other, overrides: ['{override}'], learning_rates: [0.1]}}"
    overrides = [*small(prepared, tmp_path), "comparison.baseline=adam"]
    base = "{name: adam, overrides: ['row_optimizer=adam'], learning_rates: [0.1]}"
    key = override.split(".")[0].split("=")[0]
    with pytest.raises(ConfigError, match=f"variant other overrides {key}"):
        compare([*overrides, f"comparison.variants=[{base},{variant}]"])


def test_two_comparisons_never_share_a_folder(prepared: Path, tmp_path: Path) -> None:
    with only_user_of(tmp_path), pytest.raises(ConfigError, match="another comparison"):
        compare(small(prepared, tmp_path))


def test_torchrun_is_refused(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        compare(small(prepared, tmp_path))


def test_a_whole_comparison(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = (
        "[{name: adam, learning_rates: [0.01],"
        "  overrides: ['row_optimizer=adam', '+table_row_optimizers.C3=adam']},"
        "{name: sgd, overrides: ['row_optimizer=sgd'], learning_rates: [0.1, 1.0]}]"
    )
    halving = ["comparison.search.strategy=halving", "comparison.search.max_rows=1600", "max_train_rows=3000"]
    compare([*small(prepared, tmp_path / "out"), *halving, f"comparison.variants={two}"])
    adam, sgd = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert (adam["variant"], sgd["variant"], sgd["seeds"]) == ("adam", "sgd", [3, 4])
    assert adam["auc_difference"] is None and sgd["ci_low"] < sgd["auc_difference"] < sgd["ci_high"]
    assert sgd["non_inferior"] == (sgd["ci_low"] > -0.0005)
    searched = json.loads((tmp_path / "out" / "search.json").read_text())
    assert [(rate["learning_rate"], rate["train_rows"]) for rate in searched] == [
        (0.1, 100), (1.0, 100), (0.1, 400), (1.0, 400), (0.1, 1600), (1.0, 1600),
    ]  # fmt: skip
    for rows, phase in ((100, "search/100-rows"), (1600, "search/1600-rows"), (3000, "final")):
        results = list((tmp_path / "out" / "runs" / phase / "sgd").glob("*/result.json"))
        assert len(results) == 2
        assert all(json.loads(path.read_text())["train_rows"] == rows for path in results)
    assert sgd["learning_rate"] == next(rate["learning_rate"] for rate in searched if rate["chosen"])
    assert {path.name for path in (tmp_path / "out").glob("comparison.*")} == {
        "comparison.csv", "comparison.json", "comparison.png",
    }  # fmt: skip
    assert "AUC - adam" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "row_optimizer.learning_rate alone: tables set apart keep their rates, C3 0.006" in page
    assert "max_train_rows=3000" in page and "sgd is " in page and "row_optimizer.rule" in page
