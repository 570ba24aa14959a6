"""What docs/algorithm.md claims of BASIS, in numbers; the document names the test of each claim."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows import update_rows
from torch.utils._python_dispatch import TorchDispatchMode

from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.base import RowOptimizer
from recsys_basis.row_optimizers.storage import LOG8_VALUES, Stored
from recsys_basis.tables import Table, TableShard

REPOSITORY = Path(__file__).resolve().parents[3]
DOCUMENT = (REPOSITORY / "docs" / "algorithm.md").read_text()
ETA = 0.1
DECAY = 0.999
"""The default of energy_decay and of beta2."""
OWN = {"eps": 1e-12, "energy_prior": 0.0}
"""Energy from a row's own gradients alone, and no eps that a formula must carry."""
EXACT = {"rtol": 2e-4, "atol": 1e-6}
"""float32 over a few hundred steps."""
SIGMAS = 5.0
"""Standard errors that a mean of random draws may be off by."""


def make(
    num_rows: int, width: int, rows_per_bucket: float, rule: str = "basis", **options: Any
) -> RowOptimizer:
    """One table of one partition."""
    shared = {"rows_per_bucket": rows_per_bucket} if rule == "basis" else {}
    config = row_optimizer_defaults(rule, **shared, **options)
    return create_row_optimizer(config, [TableShard.whole(Table("site", num_rows, width, 1))])


def make_partitions(num_partitions: int, each: int, buckets: int, width: int, **options: Any) -> RowOptimizer:
    """As many draws of the map from ``each`` rows to ``buckets`` bucket rows, and of the signs."""
    config = row_optimizer_defaults("basis", rows_per_bucket=each / buckets, **options)
    table = Table("site", num_partitions * each, width, num_partitions)
    return create_row_optimizer(config, [TableShard.whole(table)])


def step(optimizer: RowOptimizer, rows: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """[U, D]: the step that the rule takes over -eta, from weights 0."""
    weights = torch.zeros(optimizer.num_rows, optimizer.embedding_dim)
    update_rows(optimizer, weights, rows, gradients, ETA)
    return -weights[rows] / ETA


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- What the scalar does


@pytest.mark.parametrize("rows_per_bucket", [1.0, 8.0])
def test_rows_alike_up_to_their_size_get_lazy_adam(rows_per_bucket: float) -> None:
    """Alone in a bucket, or with rows whose g^2 is one profile [D] times any number: torch's SparseAdam."""
    rows, width, generator = 24, 6, draw(1)
    profile = 10 ** torch.empty(width).uniform_(-2, 2, generator=generator)
    size = 10 ** torch.empty(rows, 1).uniform_(-3, 3, generator=generator)
    optimizer = make(rows, width, rows_per_bucket, **OWN)
    parameter = torch.nn.Parameter(torch.zeros(rows, width))
    adam = torch.optim.SparseAdam([parameter], lr=ETA, betas=(0.0, DECAY), eps=1e-12)
    weights = torch.zeros(rows, width)
    for _ in range(60):
        touched = (torch.rand(rows, generator=generator) < 0.3).nonzero().view(-1)
        gradients = torch.randn(len(touched), width, generator=generator)
        if rows_per_bucket > 1:
            gradients = gradients.sign() * profile * size[touched]
        update_rows(optimizer, weights, touched, gradients, ETA)
        parameter.grad = torch.sparse_coo_tensor(
            touched[None], gradients, (rows, width), check_invariants=True
        )
        adam.step()
    torch.testing.assert_close(weights, parameter.detach(), **EXACT)


@pytest.mark.parametrize("prior", [0.0, 0.1, 1.0])
def test_scalar_of_equal_rows_follows_from_how_often_they_came(prior: float) -> None:
    """s = sqrt((1 - decay^T) / (1 - (1 - prior) decay^n)) at a row's nth update, the table's Tth."""
    rows, generator = 10, draw(2)
    optimizer = make(rows, 4, 10.0, eps=1e-12, energy_prior=prior)
    popularity, came = torch.linspace(0.02, 1, rows), np.zeros(rows)
    for updates in range(1, 200):
        touched = (torch.rand(rows, generator=generator) < popularity).nonzero().view(-1)
        came[touched] += 1
        signs = torch.randn(len(touched), 4, generator=generator).sign()
        expected = np.sqrt((1 - DECAY**updates) / (1 - (1 - prior) * DECAY ** came[touched]))
        moved = step(optimizer, touched, 3 * signs) * signs
        np.testing.assert_allclose(moved.numpy(), np.repeat(expected[:, None], 4, 1), rtol=1e-3)


@pytest.mark.parametrize(
    ("prior", "correction", "expected"),
    [
        (0.0, "none", lambda updates: np.full_like(updates, 31.62)),
        (0.1, "none", lambda updates: np.full_like(updates, 3.148)),
        (0.0, "table", lambda updates: np.sqrt((1 - DECAY**updates) / (1 - DECAY))),
        (0.1, "table", lambda updates: np.sqrt((1 - DECAY**updates) / (1 - 0.9 * DECAY))),
    ],
)
def test_first_step_of_a_row_met_at_update_t(prior: float, correction: str, expected: Any) -> None:
    """A new row at each update, its gradient 1: how far it goes, in steps of eta."""
    updates = np.arange(1.0, 151.0)
    optimizer = make(150, 1, 1.0, eps=1e-12, energy_prior=prior, energy_correction=correction)
    first = [float(step(optimizer, torch.tensor([row]), torch.ones(1, 1))) for row in range(150)]
    np.testing.assert_allclose(first, expected(updates), rtol=1e-3)


def test_a_positive_scalar_never_turns_a_shared_direction() -> None:
    """Shared momentum: the rows of a bucket move along one line, and one against its own gradient climbs."""
    optimizer = make(
        5, 8, 5.0, direction="momentum", scalar="hypergradient", hypergradient_rate=30.0, beta1=0.5
    )
    gradients = torch.randn(8, generator=draw(3)).repeat(5, 1)
    gradients[4] *= -1
    for _ in range(4):
        moved = step(optimizer, torch.arange(5), gradients)
    assert float(optimizer.state["scalar"].tensor[4]) == pytest.approx(0.1), "its lower clip"
    assert int(torch.linalg.matrix_rank(moved, rtol=1e-5)) == 1
    assert bool(((moved * gradients).sum(1) > 0).eq(torch.tensor([1, 1, 1, 1, 0])).all())


def test_the_best_scalar_explains_little_of_a_gradient_by_a_shared_mean() -> None:
    """Of independent normal gradients, 1/n + (1 - 1/n)/D of the squared length, s chosen with hindsight."""
    partitions, n, width = 2048, 20, 8
    optimizer = make_partitions(partitions, n, 1, width, direction="momentum", beta1=0.0)
    gradients = torch.randn(partitions * n, width, generator=draw(4))
    step(optimizer, torch.arange(partitions * n), gradients)
    mean = optimizer.state["first_moment"].tensor.repeat_interleave(n, 0)
    along = ((gradients * mean).sum(1) / mean.norm(dim=1)).square().view(partitions, n).mean(1) / width
    error = float(along.std()) / math.sqrt(partitions)
    assert float(along.mean()) == pytest.approx(1 / n + (1 - 1 / n) / width, abs=SIGMAS * error)


def test_where_its_bucket_is_quiet_a_row_may_step_far_beyond_eta() -> None:
    """Gradients (1, 0) and (0, 100) in one bucket: V^ = (1/2, 5000), and the first row goes 100 eta."""
    rows, gradients = torch.arange(2), torch.tensor([[1.0, 0.0], [0.0, 100.0]])
    expected = [
        [math.sqrt(2500.25 / 0.5) / math.sqrt(0.5), 0],
        [0, 100 * math.sqrt(0.50005) / math.sqrt(5000)],
    ]
    np.testing.assert_allclose(step(make(2, 2, 2.0, **OWN), rows, gradients), expected, rtol=1e-3)
    np.testing.assert_allclose(
        step(make(2, 2, 0, "adam", beta1=0.0), rows, gradients), [[1, 0], [0, 1]], rtol=1e-3
    )


# ---- What is shared


@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_v_is_a_weighted_mean_of_what_its_bucket_saw(data: st.DataObject) -> None:
    """V^ lies between the least and the largest g^2 of the bucket, and is never below a row's own part."""
    optimizer, steps = make(4, 1, 4.0), data.draw(st.integers(1, 12))
    squares, weights = np.zeros((steps, 4)), np.zeros((steps, 4))
    for number in range(steps):
        touched = sorted(data.draw(st.sets(st.integers(0, 3), min_size=1)))
        values = data.draw(st.lists(st.floats(0.01, 100), min_size=len(touched), max_size=len(touched)))
        squares[number, touched] = np.square(np.float32(values))
        weights[number, touched] = (1 - DECAY) * DECAY ** (steps - 1 - number) / len(touched)
        step(optimizer, torch.tensor(touched), torch.tensor(values)[:, None])
    weights /= 1 - DECAY**steps
    second = float(optimizer.state["second_moment"].tensor) / (1 - DECAY**steps)
    assert weights.sum() == pytest.approx(1)
    assert second == pytest.approx((weights * squares).sum(), rel=1e-4)
    seen = squares[weights > 0]
    assert seen.min() * (1 - 1e-4) <= second <= seen.max() * (1 + 1e-4)
    assert (second >= (weights * squares).sum(0) * (1 - 1e-4)).all()


def test_expected_overestimate_of_v_under_balanced_load() -> None:
    """(1 - 1/n) (u - v_i), u the mean v of the other rows, over maps; beyond c u in 1/c of them at most."""
    partitions, each, buckets = 4096, 8, 2
    optimizer = make_partitions(partitions, each, buckets, 1)
    v = torch.tensor([1, 1, 2, 3, 5, 8, 13, 100]).float()
    rows = torch.arange(partitions * each)
    step(optimizer, rows, v.sqrt().repeat(partitions)[:, None])
    second = optimizer.state["second_moment"].tensor[optimizer.buckets.of_rows(rows).first]  # type: ignore[attr-defined]
    excess = second.view(partitions, each) / (1 - DECAY) - v
    others = (v.sum() - v) / (each - 1)
    load = each / buckets
    error = excess.std(0) / math.sqrt(partitions)
    assert bool(((excess.mean(0) - (1 - 1 / load) * (others - v)).abs() <= SIGMAS * error).all())
    for factor in (1.5, 2, 4):
        assert float((excess >= factor * others).float().mean(0).max()) <= 1 / factor


def test_a_common_row_rules_its_bucket() -> None:
    """Balanced loads count rows, not visits: a row that comes nine times in ten is nine tenths of V."""
    optimizer = make(2, 1, 2.0)
    for number in range(400):
        row = int(number % 10 == 5)
        step(optimizer, torch.tensor([row]), torch.full((1, 1), 1.0 + 9 * row))
    second = float(optimizer.state["second_moment"].tensor) / (1 - DECAY**400)
    assert second == pytest.approx(0.9 * 1 + 0.1 * 100, rel=0.01)


@pytest.mark.parametrize("signed", [True, False])
def test_random_signs_make_a_shared_momentum_unbiased_and_noisy(signed: bool) -> None:
    """Mean: g_i / n with signs, the bucket's mean without; variance: the others' squares over n^2."""
    partitions, n, width = 4096, 4, 3
    optimizer = make_partitions(partitions, n, 1, width, direction="momentum", scalar="none", signed=signed)
    gradients = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -1.0], [-2.0, 2.0, 4.0], [0.1, -0.1, 0.0]])
    root = gradients.square().mean(0).sqrt()
    moved = step(optimizer, torch.arange(partitions * n), gradients.repeat(partitions, 1)) * root
    moved = moved.view(partitions, n, width)
    if not signed:
        torch.testing.assert_close(moved, gradients.mean(0).expand_as(moved), rtol=1e-4, atol=1e-5)
        return
    variance = (gradients.square().sum(0) - gradients.square()) / n**2
    error = variance.sqrt() / math.sqrt(partitions)
    assert bool(((moved.mean(0) - gradients / n).abs() <= SIGMAS * error + 1e-5).all())
    torch.testing.assert_close(moved.var(0), variance, rtol=0.1, atol=1e-5)


def test_an_energy_in_log8_is_exact_on_average_and_off_by_a_third() -> None:
    """Squares q of normal numbers: an energy of mean 1 and deviation sqrt(0.26 mean |q - 1| / 2) = 0.36."""
    keys, generator = torch.arange(1000), draw(5)
    codes = Stored(torch.full((1000,), 192, dtype=torch.uint8), *torch.tensor([[0], [7], [0]]))
    exact, decay = torch.ones(1000), 0.99
    assert LOG8_VALUES[192] == 1
    for number in range(400):
        square = torch.randn(1000, generator=generator).square()
        exact = exact.lerp(square, 1 - decay)
        codes.write(keys, codes.read(keys).lerp(square, 1 - decay), torch.full((1000,), number))
    off = codes.read(keys) - exact
    assert float(off.mean()) == pytest.approx(0, abs=SIGMAS * 0.36 / math.sqrt(1000))
    assert float(off.std()) == pytest.approx(0.36, rel=0.15)


# ---- What it costs


@pytest.mark.parametrize(
    ("name", "formula", "bytes_of_table", "options"),
    [
        ("float32 / float32", "4N + (4D + 4)K", 4 * 10_000 + 516 * 10, {}),
        (
            "bfloat16 / bfloat16",
            "2N + (2D + 4)K",
            2 * 10_000 + 260 * 10,
            {"moment_dtype": "bfloat16", "scalar_dtype": "bfloat16"},
        ),
        (
            "bfloat16 / log8",
            "N + (2D + 4)K",
            1 * 10_000 + 260 * 10,
            {"moment_dtype": "bfloat16", "scalar_dtype": "log8"},
        ),
        ("adam", "8DN", 1024 * 10_000, {"rule": "adam"}),
    ],
)
def test_bytes_of_state_are_the_documents(
    name: str, formula: str, bytes_of_table: int, options: dict[str, Any]
) -> None:
    """Ten thousand rows, D = 128: live state, and its bytes a row as the document prints them."""
    optimizer = make(10_000, 128, 1000.0, **options)
    assert sum(state.tensor.nbytes for state in optimizer.table_states()) == bytes_of_table + 8
    assert f"| {name} | {formula} | {bytes_of_table / 10_000:,.2f} |" in DOCUMENT


class CountFlops(TorchDispatchMode):
    """Counts arithmetic on vectors of width D: one an element, three for a lerp."""

    ONE = ("mul", "add", "sub", "div", "sqrt", "pow", "mean", "_embedding_bag_forward_only")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.total = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation that torch runs."""
        name = func.overloadpacket.__name__.removesuffix("_")
        sizes = [
            each.numel()
            for each in args
            if isinstance(each, torch.Tensor) and each.shape[1:] == (self.width,)
        ]
        self.total += {"lerp": 3, **dict.fromkeys(self.ONE, 1)}.get(name, 0) * max(sizes, default=0)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rule", "rows_per_bucket", "flops"), [("basis", 1.0, 15), ("basis", 50.0, 10.1), ("adam", 0, 12)]
)
def test_flops_of_a_touched_row(rule: str, rows_per_bucket: float, flops: float) -> None:
    """10 D a row and 5 D a touched bucket row, as the plain PyTorch code runs; lazy Adam's are 12 D."""
    optimizer = make(1000, 64, rows_per_bucket, rule)
    weights, gradients = torch.zeros(1000, 64), torch.ones(1000, 64)
    with CountFlops(64) as count:
        update_rows(optimizer, weights, torch.arange(1000), gradients, ETA)
    assert count.total == pytest.approx(flops * 1000 * 64)


def test_every_test_that_the_document_names_is_there() -> None:
    found = {
        name
        for path in REPOSITORY.glob("tests/**/test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT))
    here = set(re.findall(r"^def (test_\w+)\(", Path(__file__).read_text(), re.MULTILINE))
    assert named <= found
    assert here - {"test_every_test_that_the_document_names_is_there"} <= named, "a claim that nobody reads"
