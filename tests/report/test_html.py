"""The page stands alone, shows what the runs left, and escapes what they are called."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from recsys_basis.comparing.search import SearchedRate
from recsys_basis.report.comparison import Judging, compare_runs
from recsys_basis.report.curves import mean_curve, plot_learning, plot_search, smooth
from recsys_basis.report.html import Comparison, config_differences, merge_environments, write_html
from recsys_basis.report.records import RunRecord
from recsys_basis.report.writers import write_comparison

JUDGING = Judging("adam", margin=0.0005, num_resamples=200)


@pytest.fixture
def records(finished_run: Callable[..., RunRecord]) -> list[RunRecord]:
    runs = [finished_run(variant, seed) for variant in ("adam", "basis") for seed in (0, 1)]
    for run in runs:
        rule = f"row_optimizer: {{rule: {run.variant}, eps: 1.0e-8}}\nseed: {run.seed}\nepochs: 1\n"
        (run.run_dir / "config.yaml").write_text(rule + "output_dir: somewhere\n")
        environment = {"versions": {"torch": "2"}, "cores": 2 + run.seed, "command": ["x"]}
        (run.run_dir / "environment.json").write_text(json.dumps(environment))
        log = [{"kind": "train", "step": step, "loss": 1 / step + run.seed} for step in (1, 2, 3)]
        log.append({"kind": "evaluation", "step": 3, "auc": 0.7})
        (run.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return runs


SEARCHED = [
    SearchedRate("basis", 0.1, 100, 0.70, 0.5, False, False),
    SearchedRate("basis", 0.2, 100, 0.71, 0.5, False, False),
    SearchedRate("basis", 0.1, 400, 0.73, 0.5, True, False),
    SearchedRate("basis", 0.2, 400, 0.72, 0.5, False, False),
    SearchedRate("basis", 9.0, 400, 0.0, None, False, False),
]


class Links(HTMLParser):
    """All that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe")
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]


@pytest.mark.parametrize("searched", [SEARCHED, []])
def test_the_page_needs_nothing_beside_it(
    searched: list[SearchedRate], records: list[RunRecord], tmp_path: Path
) -> None:
    rows = compare_runs(records, JUDGING)
    write_comparison(rows, tmp_path, "a <title>", JUDGING)
    notes = ["x <diverged>"]
    write_html(Comparison("a <title>", rows, records, searched, JUDGING, "compare a=1", notes), tmp_path)
    page = (tmp_path / "report.html").read_text()
    links = Links()
    links.feed(page)
    pictures = [
        matplotlib.image.imread(io.BytesIO(base64.b64decode(link.removeprefix("data:image/png;base64,"))))
        for link in links.loaded
    ]
    assert len(pictures) == (3 if searched else 2)
    text = re.sub(r"data:[^\"]*", "", page)
    for words in (
        "a &lt;title&gt;",
        "x &lt;diverged&gt;",
        "basis is not told apart from adam",
        f"{rows[1].ci_low:+.5f} to {rows[1].ci_high:+.5f}",
        "compare a=1",
        "2 | 3",
        "eps: 1.0e-08",
    ):
        assert words in text


def test_configs_differ_by_dotted_key() -> None:
    configs = {
        "adam": {"row": {"rule": "adam", "beta1": 0.9}, "epochs": 1},
        "basis": {"row": {"rule": "basis", "eps": 1}, "epochs": 1},
    }
    expected = [("row.rule", "adam", "basis"), ("row.eps", "-", "1"), ("row.beta1", "0.9", "-")]
    assert config_differences(configs, "adam") == {"basis": expected}
    assert config_differences(configs, "sgd") == {}


def test_environments_of_several_runs(records: list[RunRecord]) -> None:
    dirs = [run.run_dir for run in records]
    assert merge_environments(dirs) == {"versions.torch": "2", "cores": "2 | 3"}


def test_curves() -> None:
    logs = [
        [{"kind": "train", "step": 1, "loss": 1.0}, {"kind": "train", "step": 2, "loss": 3.0}],
        [{"kind": "train", "step": 1, "loss": 2.0}, {"kind": "evaluation", "step": 2, "auc": 0.5}],
    ]
    steps, values = mean_curve(logs, "train", "loss")
    assert (steps.tolist(), values.tolist()) == ([1, 2], [1.5, 3.0])
    noisy = np.arange(40.0) + np.tile([-1.0, 1.0], 20)
    expected = [noisy[max(0, place - 3) : place + 4].mean() for place in range(40)]  # 15 % of 40: 3 a side
    np.testing.assert_allclose(smooth(noisy), expected)
    assert smooth(np.array([])).tolist() == []


def test_figures_show_the_runs(records: list[RunRecord]) -> None:
    losses, aucs = plot_learning(records).axes
    assert [line.get_label() for line in losses.lines] == ["adam", "basis"]
    assert losses.lines[0].get_xydata().tolist() == [[1, 1.5], [2, 1.0], [3, pytest.approx(1 / 3 + 0.5)]]
    assert aucs.lines[1].get_xydata().tolist() == [[3, 0.7]]
    (axes,) = plot_search(SEARCHED).axes
    dotted, whole, star = axes.lines
    assert (dotted.get_label(), whole.get_label()) == ("basis, 100 rows", "basis")
    assert dotted.get_xydata().tolist() == [[0.1, 0.70], [0.2, 0.71]]
    assert whole.get_xydata().tolist() == [[0.1, 0.73], [0.2, 0.72]]  # what diverged has no AUC
    assert star.get_xydata().tolist() == [[0.1, 0.73]]
