"""Clicks whose true probability is known: columns like Criteo's, and a logit that is a function of them.

    logit = b + sum_c e_c[x_c] + sum_(c, d) <h_c[x_c], h_d[x_d]> + sum_i f_i(x_i)
            b   intercept: the mean probability is the click rate
            e_c effect of a single value; as large for the rarest value as for the commonest, so that
                rare ids are worth learning
            h_c hidden vector [r] of a value, for the interacting pairs (c, d) of columns: rank r
            f_i slope and curve over log(x + 3) of an integer column, or the effect of its absence

Each of the three sums is centred and scaled to the standard deviation that the config asks for.
Probabilities are functions of what is written to the file and of nothing else, so no model can do
better than they.
n is the number of rows drawn together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from scipy.optimize import brentq
from scipy.special import expit

from recsys_basis.ingest.columns import DENSE_COLUMNS, LABEL_COLUMN, SPARSE_COLUMNS
from recsys_basis.ingest.spec import SyntheticConfig

# Distinct values of C1..C26 in the full Criteo Kaggle set, and the share of rows that lack them.
CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
MISSING_VALUES = (
    *(0.0, 0.0, 0.03, 0.03, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03, 0.0),
    *(0.0, 0.0, 0.03, 0.0, 0.0, 0.44, 0.44, 0.03, 0.76, 0.0, 0.03, 0.44, 0.44),
)
SMALL_COLUMN = 100
"""No column is scaled down to fewer values than this; smaller ones keep all of theirs."""

# Of I1..I13 there: mean and standard deviation of log(x + 3), and the share of rows that lack them.
INTEGER_SHAPES = (
    *((1.6, 0.6, 0.45), (2.5, 1.8, 0.0), (2.4, 1.0, 0.21), (2.1, 0.7, 0.21), (7.3, 2.8, 0.03)),
    *((3.6, 1.5, 0.22), (2.1, 1.0, 0.04), (2.4, 0.9, 0.0), (3.7, 1.4, 0.04), (1.3, 0.2, 0.45)),
    *((1.6, 0.5, 0.04), (1.3, 0.4, 0.77), (2.1, 0.7, 0.21)),
)
SMALLEST_INTEGER = {"I2": -2}
"""Other integer columns start at 0."""
LARGEST_LOG = 16.0
"""Of an integer: 9 million."""
CURVATURE = 0.5
"""Size of the quadratic part of f_i beside its slope."""

PILOT_ROWS = 100_000
"""Rows drawn aside, by which the sums are scaled and the intercept is solved."""


@dataclass(frozen=True)
class Clicks:
    """n rows: the raw columns as they are written, and each row's label and true click probability.

    table: label, I1..I13 int64, C1..C26 string, nulls are missing; ranks [26, n] int64 (see
    SparseColumn); labels [n] int8; probabilities [n] float64.
    """

    table: pa.Table
    ranks: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray


class Teacher:
    """Draws rows. All it does is a function of the config."""

    def __init__(self, config: SyntheticConfig) -> None:
        rng = np.random.default_rng((config.seed, 0))
        self.sparse_columns = tuple(SparseColumn(place, config, rng) for place in range(len(SPARSE_COLUMNS)))
        self.pairs = _draw_pairs(config.num_pairs, rng)
        self.integer_effects = rng.standard_normal((len(DENSE_COLUMNS), 3))
        pilot = self._draw_inputs(PILOT_ROWS, np.random.default_rng((config.seed, 1)))
        terms = self._terms(pilot)
        self._means = terms.mean(axis=1, keepdims=True)
        wanted = np.array([config.value_effect, config.pair_effect, config.integer_effect])
        self._scales = wanted[:, None] / terms.std(axis=1, keepdims=True)
        logits = self._scaled_sum(terms)
        self._intercept = brentq(lambda b: expit(b + logits).mean() - config.click_rate, -50.0, 50.0)

    def draw(self, num_rows: int, rng: np.random.Generator) -> Clicks:
        """Draw n = ``num_rows`` rows."""
        inputs = self._draw_inputs(num_rows, rng)
        probabilities = expit(self._intercept + self._scaled_sum(self._terms(inputs)))
        labels = (rng.random(num_rows) < probabilities).astype(np.int8)
        columns = {LABEL_COLUMN: pa.array(labels)}
        for name, integers, is_missing in zip(DENSE_COLUMNS, inputs.integers, inputs.is_missing, strict=True):
            columns[name] = pa.array(integers, mask=is_missing)
        for name, column, ranks in zip(SPARSE_COLUMNS, self.sparse_columns, inputs.ranks, strict=True):
            columns[name] = column.texts.take(pa.array(ranks))
        return Clicks(pa.table(columns), inputs.ranks, labels, probabilities)

    def _draw_inputs(self, num_rows: int, rng: np.random.Generator) -> _Inputs:
        ranks = np.stack([column.draw(num_rows, rng) for column in self.sparse_columns])
        integers = np.empty((len(DENSE_COLUMNS), num_rows), dtype=np.int64)
        is_missing = np.empty(integers.shape, dtype=bool)
        for place, name in enumerate(DENSE_COLUMNS):
            mean, deviation, missing = INTEGER_SHAPES[place]
            logs = np.minimum(rng.normal(mean, deviation, num_rows), LARGEST_LOG)
            integers[place] = np.maximum(np.rint(np.exp(logs)) - 3, SMALLEST_INTEGER.get(name, 0))
            is_missing[place] = rng.random(num_rows) < missing
        return _Inputs(ranks, integers, is_missing)

    def _terms(self, inputs: _Inputs) -> np.ndarray:
        """[3, n] float64: the sums over values, pairs and integer columns, not yet scaled."""
        ranks = inputs.ranks
        values = sum(column.effects[rank] for column, rank in zip(self.sparse_columns, ranks, strict=True))
        pairs = np.zeros(ranks.shape[1])
        for left, right in self.pairs:
            left_vectors = self.sparse_columns[left].hidden[ranks[left]]
            pairs += (left_vectors * self.sparse_columns[right].hidden[ranks[right]]).sum(axis=1)
        integers = np.zeros(ranks.shape[1])
        for place, (slope, curve, absence) in enumerate(self.integer_effects):
            mean, deviation, _ = INTEGER_SHAPES[place]
            z = (np.log(inputs.integers[place] + 3.0) - mean) / deviation
            effect = slope * z + CURVATURE * curve * (z**2 - 1.0)
            integers += np.where(inputs.is_missing[place], absence, effect)
        return np.stack([values, pairs, integers])

    def _scaled_sum(self, terms: np.ndarray) -> np.ndarray:
        return ((terms - self._means) * self._scales).sum(axis=0)


class SparseColumn:
    """One categorical column. Rank k = 1, 2, ... is its k-th commonest value, rank 0 a missing one.

    texts [num_values + 1] string, null at 0; effects [num_values + 1] float64;
    hidden [num_values + 1, r] float32.
    """

    def __init__(self, place: int, config: SyntheticConfig, rng: np.random.Generator) -> None:
        full = CARDINALITIES[place]
        num_values = max(min(full, SMALL_COLUMN), round(full * config.cardinality_scale))
        weights = np.arange(1, num_values + 1, dtype=np.float64) ** -config.zipf_exponent
        missing = MISSING_VALUES[place]
        shares = np.concatenate(([missing], (1.0 - missing) * weights / weights.sum()))
        self._cumulative = np.cumsum(shares)
        self.texts = _distinct_texts(num_values, place)
        self.effects = rng.standard_normal(num_values + 1)
        self.hidden = rng.standard_normal((num_values + 1, config.pair_rank), dtype=np.float32)

    def draw(self, num_rows: int, rng: np.random.Generator) -> np.ndarray:
        """Ranks: int64 [n]."""
        ranks = np.searchsorted(self._cumulative, rng.random(num_rows), side="right")
        # The last cumulative share may fall short of 1 by rounding.
        return np.minimum(ranks, len(self.effects) - 1)


@dataclass(frozen=True)
class _Inputs:
    """ranks [26, n] int64, 0 where missing; integers [13, n] int64; is_missing [13, n] bool, of integers."""

    ranks: np.ndarray
    integers: np.ndarray
    is_missing: np.ndarray


def _distinct_texts(num_values: int, place: int) -> pa.Array:
    """Null, then ``num_values`` distinct ids of 8 hex digits, others in every column."""
    ranks = np.arange(1, num_values + 1, dtype=np.uint64)
    # An odd factor permutes the numbers modulo 2 ** 32.
    numbers = (ranks * np.uint64(2654435761) + np.uint64(place * 97_003_003)) % np.uint64(2**32)
    digits = numbers.astype(">u4").tobytes().hex().encode()
    offsets = np.arange(0, len(digits) + 1, 8, dtype=np.int32)
    texts = pa.StringArray.from_buffers(num_values, pa.py_buffer(offsets), pa.py_buffer(digits))
    return pa.concat_arrays([pa.nulls(1, pa.string()), texts])


def _draw_pairs(num_pairs: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """``num_pairs`` different pairs of categorical columns."""
    left, right = np.triu_indices(len(SPARSE_COLUMNS), k=1)
    chosen = rng.choice(len(left), size=num_pairs, replace=False)
    return list(zip(left[chosen].tolist(), right[chosen].tolist(), strict=True))
