from __future__ import annotations

import math

import numpy as np
import pytest

from recsys_basis.ingest import teacher as teacher_module
from recsys_basis.ingest.columns import DENSE_COLUMNS, RAW_COLUMNS, SPARSE_COLUMNS
from recsys_basis.ingest.spec import SyntheticConfig
from recsys_basis.ingest.teacher import CARDINALITIES, INTEGER_SHAPES, MISSING_VALUES, Teacher

CONFIG = SyntheticConfig(
    path="unused",
    rows=100,
    seed=0,
    zipf_exponent=1.1,
    cardinality_scale=0.001,
    click_rate=0.256,
    value_effect=1.0,
    pair_effect=0.7,
    integer_effect=0.6,
    pair_rank=4,
    num_pairs=20,
    test_fraction=0.2,
    overwrite=False,
)
NUM_ROWS = 60_000


@pytest.fixture(scope="module")
def clicks():
    return Teacher(CONFIG).draw(NUM_ROWS, np.random.default_rng(5))


def logits_of(config: SyntheticConfig, num_rows: int = 20_000) -> np.ndarray:
    p = Teacher(config).draw(num_rows, np.random.default_rng(1)).probabilities
    return np.log(p / (1 - p))


def test_columns_look_like_criteo(clicks):
    assert tuple(clicks.table.column_names) == RAW_COLUMNS
    for place, name in enumerate(SPARSE_COLUMNS):
        column = clicks.table[name]
        assert column.null_count / NUM_ROWS == pytest.approx(MISSING_VALUES[place], abs=0.01)
        texts = column.drop_null().unique().to_pylist()
        assert all(len(text) == 8 and int(text, 16) < 2**32 for text in texts)
        most = max(min(CARDINALITIES[place], 100), round(CARDINALITIES[place] * 0.001))
        assert 0.2 * most < len(texts) <= most
    for place, name in enumerate(DENSE_COLUMNS):
        column = clicks.table[name]
        assert column.null_count / NUM_ROWS == pytest.approx(INTEGER_SHAPES[place][2], abs=0.01)
        smallest = min(column.drop_null().to_pylist())
        assert smallest == (-2 if name == "I2" else 0)


def test_values_are_drawn_by_zipf(clicks):
    # Ranks 1, 2, 4, 8 of a column without missing values.
    counts = np.bincount(clicks.ranks[SPARSE_COLUMNS.index("C11")], minlength=9)
    for rank in (2, 4, 8):
        expected = rank**-1.1
        deviation = 5 * expected / math.sqrt(counts[rank])
        assert counts[rank] / counts[1] == pytest.approx(expected, abs=deviation)
    assert counts[0] == 0


def test_texts_of_a_column_are_distinct():
    for column in Teacher(CONFIG).sparse_columns:
        texts = column.texts.to_pylist()
        assert texts[0] is None
        assert len(set(texts)) == len(texts)


def test_probabilities_are_calibrated_and_mean_the_click_rate(clicks):
    assert clicks.probabilities.mean() == pytest.approx(0.256, abs=0.005)
    order = np.argsort(clicks.probabilities)
    for part in np.array_split(order, 20):
        expected = clicks.probabilities[part].mean()
        deviation = math.sqrt((clicks.probabilities[part] * (1 - clicks.probabilities[part])).sum()) / len(
            part
        )
        assert abs(clicks.labels[part].mean() - expected) < 4 * deviation


def test_the_logit_is_the_documented_sum_over_the_written_values():
    teacher = Teacher(CONFIG)
    drawn = teacher.draw(400, np.random.default_rng(2))
    ranks_of = [{text: rank for rank, text in enumerate(c.texts.to_pylist())} for c in teacher.sparse_columns]
    sums = []
    for row in zip(*(column.to_pylist() for column in drawn.table.columns), strict=True):
        ranks = [ranks_of[place][text] for place, text in enumerate(row[14:])]
        values = sum(c.effects[rank] for c, rank in zip(teacher.sparse_columns, ranks, strict=True))
        hidden = [c.hidden[rank].tolist() for c, rank in zip(teacher.sparse_columns, ranks, strict=True)]
        pairs = sum(x * y for c, d in teacher.pairs for x, y in zip(hidden[c], hidden[d], strict=True))
        integers = 0.0
        for integer, shape, effects in zip(row[1:14], INTEGER_SHAPES, teacher.integer_effects, strict=True):
            if integer is None:
                integers += effects[2]
            else:
                z = (math.log(integer + 3) - shape[0]) / shape[1]
                integers += effects[0] * z + 0.5 * effects[1] * (z * z - 1)
        sums.append([1.0, values, pairs, integers])
    logits = np.log(drawn.probabilities / (1 - drawn.probabilities))
    scales, *_ = np.linalg.lstsq(np.array(sums), logits, rcond=None)
    np.testing.assert_allclose(np.array(sums) @ scales, logits, atol=1e-4)
    assert all(scales[1:] > 0)


def test_pairs_are_different_pairs_of_columns(monkeypatch):
    monkeypatch.setattr(teacher_module, "PILOT_ROWS", 100)
    for num_pairs in (20, 325):
        pairs = Teacher(CONFIG.model_copy(update={"num_pairs": num_pairs})).pairs
        assert len(set(pairs)) == num_pairs
        assert all(0 <= left < right < 26 for left, right in pairs)


@pytest.mark.parametrize("key", ["value_effect", "pair_effect", "integer_effect"])
def test_each_effect_has_the_deviation_asked_for(key):
    config = CONFIG.model_copy(
        update={"value_effect": 0.0, "pair_effect": 0.0, "integer_effect": 0.0, key: 0.9}
    )
    assert logits_of(config).std() == pytest.approx(0.9, rel=0.03)


def test_rare_values_carry_as_much_as_common_ones():
    for column in Teacher(CONFIG).sparse_columns:
        half = len(column.effects) // 2
        if half > 1000:
            assert column.effects[half:].std() == pytest.approx(column.effects[:half].std(), rel=0.1)


def test_a_seed_makes_a_teacher():
    first, again = Teacher(CONFIG), Teacher(CONFIG)
    other = Teacher(CONFIG.model_copy(update={"seed": 1}))
    draws = [teacher.draw(100, np.random.default_rng(0)) for teacher in (first, again, other)]
    assert np.array_equal(draws[0].probabilities, draws[1].probabilities)
    assert draws[0].table.equals(draws[1].table)
    assert not np.array_equal(draws[0].probabilities, draws[2].probabilities)
