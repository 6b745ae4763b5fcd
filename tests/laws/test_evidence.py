"""The error rates of the evidence on simulated data, without a model."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.roles._evidence import (
    FEWEST_INSTANCES,
    FEWEST_TEXTS,
    Family,
    best_of,
    halves,
    judge,
    lift,
    max_t,
)
from headwise.tables import ratio_interval

seeds = st.integers(0, 2**32 - 1)


def null_data(rng, texts=40, questions=60):
    """Gains without an effect: correlated, from texts of unequal length."""
    length = rng.integers(1, 30, (texts, 1))
    shared = rng.standard_normal((texts, 1))
    noise = rng.standard_t(4, (texts, questions))
    return (length * (0.5 * shared + noise)).astype(np.float32)


def test_false_discoveries_are_as_rare_as_promised():
    repeats = 400
    rng = np.random.default_rng(3)
    discoveries = 0
    for seed in range(repeats):
        # Two families at once: the error rate is controlled over both.
        families = [null_data(rng), null_data(rng, texts=31, questions=7)]
        adjusted = max_t(families, flips=499, seed=seed)
        discoveries += min(p.min() for p in adjusted) <= 0.05
    # Three standard errors of a rate of .05 above it.
    assert discoveries / repeats <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / repeats)
    assert discoveries > 0  # a test that never rejects would pass the line above


def test_a_gain_below_zero_is_never_a_discovery():
    gains = null_data(np.random.default_rng(0)) - 3.0
    assert max_t([gains], flips=499)[0].min() > 0.5


def test_p_is_the_share_of_sign_flips_with_as_large_a_gain():
    gains = np.random.default_rng(5).normal(0.6, 1.0, (9, 3)).astype(np.float32)
    signs = np.array(list(product((-1, 1), repeat=9)))
    t = (signs @ gains) / np.sqrt((gains**2).sum(0))
    exact = (t.max(1)[:, None] >= t[-1] - 1e-5).mean(0)  # the last row flips no sign
    drawn = max_t([gains], flips=40_000)[0]
    np.testing.assert_allclose(drawn, exact, atol=4 * np.sqrt(0.25 / 40_000))


def test_columns_of_zeros_and_equal_columns():
    rng = np.random.default_rng(1)
    column = rng.normal(2.0, 1.0, (40, 1)).astype(np.float32)
    gains = np.concatenate([column, column, np.zeros_like(column), 5 * column], axis=1)
    p = max_t([gains], flips=999)[0]
    assert p[0] == p[1] == p[3] == 1 / 1000
    assert p[2] > 0.9
    # Zeros alone: every flip reaches the observed value.
    assert max_t([np.zeros((40, 3), np.float32)], flips=99)[0].tolist() == [1.0] * 3


def test_no_hypotheses_have_no_p():
    p = max_t([np.zeros((40, 0), np.float32), np.ones((35, 1), np.float32)], flips=99)
    assert [len(values) for values in p] == [0, 1]


@given(seeds)
def test_reordering_hypotheses_reorders_their_p(seed):
    rng = np.random.default_rng(seed)
    gains = null_data(rng, texts=33, questions=9) + 2.0
    order = rng.permutation(9)
    p = max_t([gains], flips=199)[0]
    np.testing.assert_array_equal(max_t([gains[:, order]], flips=199)[0], p[order])


def drawn_scores(rng, texts, rate):
    """Hits in texts that differ in length and in their own rates around `rate`."""
    count = rng.integers(1, 25, (texts, 1)).astype(np.float32)
    rates = rng.beta(6 * rate, 6 * (1 - rate), (texts, 1))
    return rng.binomial(count.astype(int), rates).astype(np.float32), count


@pytest.mark.parametrize("rate", [0.2, 0.6])
def test_the_interval_covers_the_truth_at_its_level(rate):
    rng = np.random.default_rng(11)
    drawn = [drawn_scores(rng, 60, rate) for _ in range(500)]
    value = np.concatenate([scores for scores, _ in drawn], axis=1)
    low, high = np.empty(500), np.empty(500)
    for row, (scores, count) in enumerate(drawn):
        low[row : row + 1], high[row : row + 1] = ratio_interval(scores, count, draws=400, seed=row)
    covered = ((low <= rate) & (rate <= high)).mean()
    assert value.shape == (60, 500)
    assert 0.91 <= covered <= 0.98


def test_an_interval_needs_two_texts():
    value = np.array([[1.0, 1.0], [2.0, 0.0]], np.float32)
    count = np.array([[2.0, 2.0], [2.0, 0.0]], np.float32)
    low, high = ratio_interval(value, count)
    assert (low[0], high[0]) == (0.5, 1.0)
    assert np.isnan([low[1], high[1]]).all()


def test_a_case_worked_out_by_hand():
    # 40 texts of 2 queries: hits 3 of 4, a heuristic 1 of 2, chance 1 of 10.
    value = np.tile([[2.0], [1.0]], (20, 1)).astype(np.float32)
    count = np.full((40, 1), 2.0, np.float32)
    nulls = {"chance": count / 10, "rule": count / 2, "absent": np.full_like(count, np.nan)}
    (verdict,) = judge([Family(value, count, nulls)], flips=999)
    assert verdict.effect[0] == pytest.approx(0.75)
    assert list(nulls)[verdict.null[0]] == "rule"
    assert verdict.baseline[0] == pytest.approx(0.5)
    assert verdict.lift[0] == pytest.approx(0.5)  # (.75 − .5) / (1 − .5)
    assert (verdict.n[0], verdict.texts[0]) == (80, 40)
    assert verdict.low[0] < 0.75 < verdict.high[0]
    assert verdict.p[0] == 1 / 1000
    np.testing.assert_allclose(verdict.rates[:, 0], [0.1, 0.5, np.nan])


@pytest.mark.parametrize(
    ("texts", "each", "judged"),
    [
        (FEWEST_TEXTS, 1, True),
        (FEWEST_TEXTS - 1, 5, False),
        (FEWEST_TEXTS, (FEWEST_INSTANCES - 1) / FEWEST_TEXTS, False),
    ],
)
def test_few_texts_are_not_tested(texts, each, judged):
    count = np.full((texts, 1), each, np.float32)
    (verdict,) = judge([Family(count.copy(), count, {"chance": count / 10})], flips=99)
    assert verdict.effect[0] == pytest.approx(1.0)
    assert np.isnan(verdict.p[0]) != judged


def test_a_hypothesis_without_queries_is_nan_and_not_zero():
    nothing = np.zeros((40, 1), np.float32)
    (verdict,) = judge([Family(nothing, nothing, {"chance": nothing})], flips=9)
    said = [verdict.effect, verdict.low, verdict.high, verdict.baseline, verdict.lift, verdict.p]
    assert np.isnan(said).all()
    assert (verdict.null[0], verdict.n[0]) == (-1, 0)


@given(seeds)
def test_the_order_of_texts_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    value, count = drawn_scores(rng, 35, 0.4)
    order = rng.permutation(35)
    (first,) = judge([Family(value, count, {"chance": count / 3})], flips=9, draws=9)
    (second,) = judge(
        [Family(value[order], count[order], {"chance": count[order] / 3})], flips=9, draws=9
    )
    for name in ("effect", "baseline", "lift", "n", "texts", "rates"):
        np.testing.assert_allclose(getattr(first, name), getattr(second, name), rtol=1e-5)


@given(st.integers(0, 200), seeds)
def test_the_halves_are_disjoint_and_complete(texts, seed):
    assert halves(texts, seed).sum() == texts // 2


def test_lift_is_nan_where_chance_is_one():
    lifts = lift(np.array([0.5, 1.0, 0.1]), np.array([0.5, 1.0, 0.2]))
    np.testing.assert_allclose(lifts, [0.0, np.nan, -0.125])


def test_the_best_heuristic_has_the_best_ratio_of_sums():
    value = np.array([[[1.0, 0.0]], [[0.0, 3.0]]])  # 2 texts, 1 role, 2 rules
    assert best_of(value, np.array([[1.0], [9.0]])).tolist() == [1]
    assert best_of(np.zeros((2, 1, 2)), np.zeros((2, 1))).tolist() == [0]  # no queries to select on
