"""BASIS in all its forms against a loop over rows and buckets in float64, written from the specification.

The loop shares no code with the package: it has buckets, seeds and moments of its own, in plain Python.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from support.rows import update_rows

from recsys_basis.id_counts import IdCounts
from recsys_basis.row_optimizers import create_row_optimizer, row_optimizer_defaults
from recsys_basis.row_optimizers.basis import BasisConfig
from recsys_basis.segments import Segments
from recsys_basis.tables import Table, TableShard

ETA = 0.1
# float32 against float64 over all steps.
TOLERANCE = {"rtol": 3e-4, "atol": 3e-6}
TABLES = (("site", 118, 4), ("device", 3, 1), ("user", 61, 2))
BITS = (1 << 64) - 1


def mix(value: int) -> int:
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & BITS
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & BITS
    return value ^ value >> 33


def shuffle(x: int, size: int, keys: list[int]) -> int:
    a = math.isqrt(size - 1) + 1 if size > 1 else 1
    b = math.ceil(size / a)
    while True:
        left, right = x % a, x // a
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + (mix(right ^ key) & (1 << 62) - 1)) % a
            else:
                right = (right + (mix(left ^ key) & (1 << 62) - 1)) % b
        x = right * a + left
        if x < size:
            return x


def mirrored(number: int, power: int) -> int:
    """The log2(power) binary digits of ``number``, read backwards."""
    digits = power.bit_length() - 1
    return int(f"{number:0{digits}b}"[::-1], 2) if digits else 0


def count_of(i: int) -> int:
    """Made-up training counts: some of id 0, then falling, the last ones 0."""
    return 7 if i == 0 else 40 // (i + 1)


class LoopTable:
    """One table: its rows are ids, its buckets (partition, number)."""

    def __init__(self, config: Any, name: str, num_ids: int, partitions: int, dim: int) -> None:
        self.c, self.name, self.partitions = config, name, partitions
        self.n = math.ceil(num_ids / partitions)
        self.k = max(1, math.floor(self.n / config.rows_per_bucket))
        h = math.ceil(config.head_rows / partitions) or round(config.head_bucket_share * self.k)
        self.h = min(h, self.k if self.k == self.n else self.k - 1)
        self.M: Any = defaultdict(lambda: np.zeros(dim))
        self.V: Any = defaultdict(lambda: np.zeros(dim))
        self.t: Any = defaultdict(int)
        self.s: Any = defaultdict(lambda: 1.0)
        self.e: Any = defaultdict(float)
        self.T = 0

    def seed(self, use: str, partition: int) -> int:
        text = f"{self.name}/bucket/{use}/{self.c.hash_seed}/{partition}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def private(self, i: int) -> bool:
        return i // self.partitions < self.h

    def buckets(self, i: int) -> list[tuple[int, int]]:
        """One bucket, or two where double hashing found different ones."""
        p, q = mirrored(i % self.partitions, self.partitions), i // self.partitions
        if q < self.h:
            return [(p, q)]
        x, shared = q - self.h, self.k - self.h
        if self.c.hash == "modulo":
            found = [x % shared]
        elif self.c.hash == "balanced":
            keys = [self.seed(f"key{number}", p) for number in range(4)]
            found = [shuffle(x, self.n - self.h, keys) % shared]
        else:
            uses = ["key0", "key1"] if self.c.hash == "double" else ["key0"]
            found = [(mix(x ^ self.seed(use, p)) & (1 << 63) - 1) % shared for use in uses]
        return [(p, self.h + number) for number in dict.fromkeys(found)]

    def sign(self, i: int) -> int:
        if not self.c.signed or self.private(i):
            return 1
        p, q = mirrored(i % self.partitions, self.partitions), i // self.partitions
        return 1 if mix((q - self.h) ^ self.seed("sign", p)) & 1 else -1

    def m_hat(self, i: int) -> Any:
        hats = [self.M[b] / (1 - self.c.beta1 ** self.t[b]) for b in self.buckets(i)]
        return sum(hats) / len(hats)

    def v_hat(self, i: int) -> Any:
        return np.min([self.V[b] / (1 - self.c.beta2 ** self.t[b]) for b in self.buckets(i)], axis=0)

    def step(self, w: dict[int, Any], g: dict[int, Any]) -> None:
        """Steps 1 to 6 for gradients g of distinct ids, on weights w."""
        c = self.c
        self.T += 1
        if c.scalar == "hypergradient":  # 1
            for i in g:
                self.s[i] = self.next_scalar(i, g[i])
        rows: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i in g:
            for b in self.buckets(i):
                rows[b].append(i)
        for b, members in rows.items():
            g_b = sum(self.sign(i) * g[i] for i in members) / len(members)  # 2
            q_b = sum(g[i] ** 2 for i in members) / len(members)
            self.M[b] = c.beta1 * self.M[b] + (1 - c.beta1) * g_b  # 3
            self.V[b] = c.beta2 * self.V[b] + (1 - c.beta2) * q_b
            self.t[b] += 1
        for i in g:
            if c.scalar == "energy":  # 4
                self.s[i] = self.energy_scalar(i, g[i])
            momentum = c.direction == "momentum" or (c.direction == "head_momentum" and self.private(i))
            direction = self.sign(i) * self.m_hat(i) if momentum else g[i]  # 5
            step = self.s[i] * direction / (np.sqrt(self.v_hat(i)) + c.eps)  # 6
            w[i] = w[i] - ETA * step - ETA * c.weight_decay * w[i]

    def next_scalar(self, i: int, g: Any) -> float:
        c = self.c
        if any(self.t[b] == 0 for b in self.buckets(i)):
            u = np.zeros_like(g)
        else:
            u = self.sign(i) * self.m_hat(i) / (np.sqrt(self.v_hat(i)) + c.eps)
        inner = float(u @ g)
        if c.hypergradient_normalized and inner != 0:
            inner /= float(np.linalg.norm(u) * np.linalg.norm(g))
        eta_s = c.hypergradient_rate * ETA
        if c.hypergradient_by_frequency == "bucket":
            eta_s /= max(1, self.t[self.buckets(i)[0]])
        if c.hypergradient_by_frequency == "row":
            eta_s /= max(1, count_of(i))
        g_s = -ETA * inner
        if c.hypergradient_form == "log":
            s = math.exp(math.log(self.s[i]) - eta_s * g_s)
        else:
            s = self.s[i] - eta_s * g_s
        return min(max(s, c.scalar_min), c.scalar_max)

    def energy_scalar(self, i: int, g: Any) -> float:
        c, new = self.c, float((g**2).mean())
        if c.energy_start == "prior" and i not in self.e:
            self.e[i] = c.energy_prior * float(self.v_hat(i).mean())
        if c.energy_decay == 1:
            self.e[i] += new
        elif c.energy_start == "first" and i not in self.e:
            self.e[i] = new
        else:
            self.e[i] = c.energy_decay * self.e[i] + (1 - c.energy_decay) * new
        corrected = c.energy_correction == "table" and c.energy_decay < 1
        energy = self.e[i] / (1 - c.energy_decay**self.T) if corrected else self.e[i]
        return math.sqrt(float(self.v_hat(i).mean()) / energy)


COMMON: dict[str, Any] = {"rows_per_bucket": 5.0, "beta1": 0.8, "beta2": 0.97, "hypergradient_rate": 3.0}
CLIPPED = {"scalar_min": 0.9, "scalar_max": 1.1}


def _forms() -> list[dict[str, Any]]:
    forms: list[dict[str, Any]] = [
        {"direction": direction, "scalar": scalar, "hash": hash_name}
        | ({"head_bucket_share": 0.5} if direction == "head_momentum" else {})
        for direction, scalar, hash_name in itertools.product(
            ("gradient", "momentum", "head_momentum"),
            ("none", "hypergradient", "energy"),
            ("balanced", "double"),
        )
    ]
    momentum = {"direction": "momentum", "scalar": "none"}
    hyper = {"direction": "momentum", "scalar": "hypergradient"}
    forms += [momentum | {"signed": True, "hash": h} for h in ("balanced", "murmur3", "double", "modulo")]
    forms += [
        {"hash": "murmur3"},
        {"hash": "modulo"},
        hyper | {"signed": True, "head_rows": 9},
        hyper | CLIPPED,
        hyper | {"hypergradient_form": "log"},
        hyper | {"hypergradient_form": "log", "hash": "double"} | CLIPPED,
        hyper | {"hypergradient_normalized": True, "hypergradient_rate": 20.0},
        hyper | {"hypergradient_by_frequency": "bucket", "hypergradient_rate": 20.0},
        hyper | {"hypergradient_by_frequency": "bucket", "hypergradient_rate": 20.0, "hash": "double"},
        hyper | {"hypergradient_by_frequency": "row", "hypergradient_rate": 20.0},
        {"scalar": "energy", "energy_decay": 0.9, "energy_start": "first"},
        {"scalar": "energy", "energy_decay": 0.9, "energy_start": "prior", "energy_prior": 0.0},
        {"scalar": "energy", "energy_decay": 0.9, "energy_start": "prior", "energy_prior": 0.3},
        {"scalar": "energy", "energy_decay": 0.9, "energy_correction": "none"},
        {"energy_decay": 1.0, "energy_start": "prior", "energy_prior": 2.0, "hash": "double"},
        {"scalar": "energy", "energy_decay": 0.9, "energy_start": "first", "direction": "momentum"},
        {"weight_decay": 0.3, "direction": "momentum"},
        {"eps": 0.1},
        {"beta1": 0.0, "beta2": 0.0, "direction": "momentum", "scalar": "none"},
        {"rows_per_bucket": 1.0, "head_bucket_share": 1.0, "direction": "head_momentum"},
        {"rows_per_bucket": 2.5, "head_rows": 21, "direction": "head_momentum", "hash_seed": 5},
        {"rows_per_bucket": 1000.0},
    ]
    return forms


FORMS = _forms()


@pytest.mark.parametrize(
    "form", FORMS, ids=[" ".join(f"{key}={value}" for key, value in form.items()) for form in FORMS]
)
def test_every_form_follows_the_loop(form: dict[str, Any], batches: Any) -> None:
    run_beside_the_loop(COMMON | form, 5, 25, batches)


@pytest.mark.parametrize("dim", [1, 3, 16, 100])
def test_odd_widths_follow_the_loop(dim: int, batches: Any) -> None:
    for form in ({}, {"direction": "momentum", "scalar": "hypergradient", "hash": "double", "signed": True}):
        run_beside_the_loop(COMMON | form, dim, 20, batches)


def test_clip_bounds_are_reached(batches: Any) -> None:
    options = COMMON | {"direction": "momentum", "scalar": "hypergradient"} | CLIPPED
    optimizer = run_beside_the_loop(options, 5, 25, batches)
    scalar = optimizer.state["scalar"].tensor
    assert scalar.min().item() == pytest.approx(0.9) and scalar.max().item() == pytest.approx(1.1)


def test_private_rows_with_momentum_and_no_scalar_are_adam_with_a_clock_each(batches: Any) -> None:
    """One row a bucket: torch's Adam on each row alone, stepped only when the row comes."""
    options = {"direction": "momentum", "scalar": "none", "rows_per_bucket": 1.0, "eps": 1e-3}
    optimizer = create_row_optimizer(
        row_optimizer_defaults("basis", **options), [TableShard.whole(Table("site", 30, 4, 1))]
    )
    weights = torch.randn(30, 4, generator=torch.Generator().manual_seed(3))
    params = [torch.nn.Parameter(row.clone()) for row in weights]
    adams = [torch.optim.Adam([param], lr=ETA, eps=1e-3) for param in params]
    for items, gradients in batches(30, 4, 25, 11):
        segments = Segments.of(items)
        summed = segments.sum(gradients)
        update_rows(optimizer, weights, segments.keys, summed, ETA)
        for row, gradient in zip(segments.keys.tolist(), summed, strict=True):
            params[row].grad = gradient.clone()
            adams[row].step()
    torch.testing.assert_close(
        weights, torch.stack([param.detach() for param in params]), rtol=2e-5, atol=2e-6
    )


def test_energy_far_below_its_buckets_stays_finite() -> None:
    """Gradients 1e-20 and 1 in one bucket: each row's step is its own gradient's sign, though V/e is 5e39."""
    config = row_optimizer_defaults("basis", energy_decay=1.0, energy_start="first", rows_per_bucket=2.0)
    optimizer = create_row_optimizer(config, [TableShard.whole(Table("site", 2, 1, 1))])
    weights = torch.zeros(2, 1)
    update_rows(optimizer, weights, torch.tensor([0, 1]), torch.tensor([[1e-20], [-1.0]]), ETA)
    torch.testing.assert_close(weights, torch.tensor([[-ETA], [ETA]]), rtol=1e-4, atol=0)


def run_beside_the_loop(options: dict[str, Any], dim: int, num_steps: int, batches: Any) -> Any:
    """Step both, then compare weights and all state; returns ours."""
    config = row_optimizer_defaults("basis", **options)
    assert isinstance(config, BasisConfig)
    tables = [
        Table(name, num_ids, dim, partitions, IdCounts.of(np.array([count_of(i) for i in range(num_ids)])))
        for name, num_ids, partitions in TABLES
    ]
    loops = [LoopTable(config, *table, dim) for table in TABLES]
    optimizer = create_row_optimizer(config, [TableShard.whole(table) for table in tables])
    weights = torch.randn(optimizer.num_rows, dim, generator=torch.Generator().manual_seed(2))
    loop_weights: list[dict[int, Any]] = [
        {
            int(i): w.double().numpy()
            for i, w in zip(table.ids_of(torch.arange(table.num_rows)), part, strict=True)
        }
        for table, part in zip(tables, weights.split([t.num_rows for t in tables]), strict=True)
    ]
    ends = [*optimizer.row_starts[1:], optimizer.num_rows]
    for items, gradients in batches(optimizer.num_rows, dim, num_steps, 13):
        segments = Segments.of(items)
        update_rows(optimizer, weights, segments.keys, segments.sum(gradients), ETA)
        for table, loop, w, start, end in zip(
            tables, loops, loop_weights, optimizer.row_starts, ends, strict=True
        ):
            g: dict[int, Any] = {}
            for item, gradient in zip(items.tolist(), gradients.double().numpy(), strict=True):
                if start <= item < end:
                    i = int(table.ids_of(torch.tensor(item - start)))
                    g[i] = g.get(i, 0) + gradient
            loop.step(w, g)
    for table, w, start in zip(tables, loop_weights, optimizer.row_starts, strict=True):
        for i in range(table.num_rows):
            row = start + int(table.rows_of(torch.tensor(i)))
            np.testing.assert_allclose(weights[row].numpy(), w[i], err_msg=f"{table.name} {i}", **TOLERANCE)
    compare_states(optimizer, config, tables, loops)
    return optimizer


def compare_states(optimizer: Any, config: Any, tables: list[Table], loops: list[LoopTable]) -> None:
    """All state that must exist, and no other."""
    views = {(state.table, state.name): state.tensor.numpy() for state in optimizer.table_states()}
    everywhere = config.direction == "momentum" or config.scalar == "hypergradient"
    for table, loop in zip(tables, loops, strict=True):
        buckets = [(p, number) for p in range(table.num_partitions) for number in range(loop.k)]
        expected = {"second_moment": np.stack([loop.V[b] for b in buckets])}
        expected["updates"] = np.array([loop.t[b] for b in buckets])
        kept = buckets if everywhere else [b for b in buckets if b[1] < loop.h]
        if (everywhere or config.direction == "head_momentum") and kept:
            expected["first_moment"] = np.stack([loop.M[b] for b in kept])
        ids = table.ids_of(torch.arange(table.num_rows)).tolist()
        if config.scalar == "hypergradient":
            expected["scalar"] = np.array([loop.s[i] for i in ids])
        if config.scalar == "energy":
            expected["energy"] = np.array([loop.e[i] for i in ids])
            if config.energy_correction == "table" and config.energy_decay < 1:
                expected["table_updates"] = np.array([loop.T])
        assert {name for owner, name in views if owner == table.name} == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(
                views[table.name, name], value, err_msg=f"{table.name} {name}", **TOLERANCE
            )
