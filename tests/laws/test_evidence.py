"""The error rates of the evidence on simulated data, without a model."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.roles.evidence import (
    FEWEST_TEXTS,
    Hypotheses,
    has_role,
    is_promising,
    lift,
    of_examples,
    run_tests,
    step_down,
)
from headwise.roles.evidence._hypotheses import FEWEST_INSTANCES, best_of
from headwise.roles.evidence._significance import tail_shares
from headwise.roles.relations import Role
from headwise.tables import halves, ratio_interval
from tiers import tiers

seeds = st.integers(0, 2**32 - 1)


def null_data(rng, texts=40, questions=60):
    """Gains without an effect: correlated, from texts of unequal length."""
    length = rng.integers(1, 30, (texts, 1))
    shared = rng.standard_normal((texts, 1))
    noise = rng.standard_t(4, (texts, questions))
    return (length * (0.5 * shared + noise)).astype(np.float32)


def discoveries(draw, repeats=150, draws=600):
    """The share of repeats in which any column of gains without an effect gets p ≤ .05."""
    found = 0
    for seed in range(repeats):
        gains, worst = draw(np.random.default_rng(seed))
        found += min(p.min() for p in step_down(gains, worst, draws=draws, seed=seed)) <= 0.05
    return found / repeats


def most(repeats=150):
    """Three standard errors of a rate of .05 above it."""
    return 0.05 + 3 * np.sqrt(0.05 * 0.95 / repeats)


def correlated(rng):
    return [null_data(rng), null_data(rng, texts=31, questions=7)], None


def often_little_and_rarely_much(rng, texts=60):
    """A head that is mostly a little better and, in one text of ten, much worse; 0 on average."""
    count = rng.integers(1, 20, (texts, 1))
    gains = count * np.where(rng.random((texts, 100)) < 0.1, -0.9, 0.1)
    return [gains.astype(np.float32)], [np.full(100, -count.mean())]


def losses_too_rare_to_be_seen(rng, texts=30):
    """As above, with one text of twenty: many columns of 30 texts have no loss at all."""
    gains = np.where(rng.random((texts, 60)) < 0.05, -0.95, 0.05)
    return [gains.astype(np.float32)], [np.full(60, -1.0)]


def long_tail_below(rng):
    return [(1 - rng.exponential(1.0, (90, 80))).astype(np.float32)], None


@pytest.mark.parametrize(
    "draw",
    tiers(
        [correlated, losses_too_rare_to_be_seen], [often_little_and_rarely_much, long_tail_below]
    ),
)
def test_false_discoveries_are_as_rare_as_promised(draw):
    # Two families at once in the first case: the error rate is controlled over both.
    assert discoveries(draw) <= most()


def test_a_head_named_beforehand_is_found_as_often_as_its_p_says():
    """Of heads as right as their null, each alone: by chance in one of twenty, however many."""
    found = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        right, chance = rng.random((2, 80, 5)) < 0.5
        family = of_examples("task", right * 1.0, np.ones(80), {"chance": chance * 1.0}, {},
                             halves(80, seed))  # fmt: skip
        for head in range(5):
            alone = family.only([0], [head], screened=False)
            (tested,) = run_tests([alone], draws=300, intervals=False)
            found.append(tested["p_adj"].item() < 0.05)
    assert 0.01 < np.mean(found) < most(len(found))


def test_a_head_that_is_always_right_is_not_certain():
    """Of heads right in 97 of 100 cases, two in five are right in all of 30."""
    right = (np.random.default_rng(0).random((60, 300)) < 0.97) * 1.0
    family = of_examples("task", right, np.ones(60), {"chance": 0.5 + 0 * right}, {}, halves(60))
    (tested,) = run_tests([family], draws=10)
    low, high, effect = tested[["ci_low", "ci_high", "effect"]].to_numpy().T
    assert 0.3 < (effect == 1).mean() < 0.5
    assert ((low < 0.97) & (high > 0.97)).mean() > 0.93
    assert {*low[effect == 1].round(3)} == {0.886}  # Wilson's, of 30


def test_flipping_signs_would_reject_skewed_gains():
    """Why no sign is flipped: the same columns without an effect are found nearly always."""
    found = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        (gains,), _ = often_little_and_rarely_much(rng)
        gains = gains / np.sqrt((gains**2).sum(0))
        flipped = rng.choice([-1.0, 1.0], (400, len(gains))) @ gains
        found += gains.sum(0).max() > np.quantile(flipped.max(1), 0.95)
    assert found / 40 > 0.9


def test_an_effect_among_columns_without_one_is_found_alone():
    alone = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        gains = null_data(rng, texts=60)
        gains[:, 7] += 2.0 * gains.std(0)[7]
        alone += (np.flatnonzero(step_down([gains], draws=600)[0] <= 0.05) == [7]).all()
    assert alone >= 35


def test_stepping_down_finds_more_than_the_largest_maximum_allows():
    rng = np.random.default_rng(4)
    gains = rng.normal(0.0, 1.0, (200, 400)).astype(np.float32)
    gains[:, :390] += 2.0
    both = step_down([gains[:, 390:]], draws=600)[0], step_down([gains], draws=600)[0][390:]
    # Columns that are certain to have an effect do not weaken the test of the others.
    np.testing.assert_allclose(both[1], both[0], atol=0.1)


def test_p_is_the_share_of_resamples_with_as_large_a_t():
    gains = np.random.default_rng(5).normal(0.2, 1.0, (5, 1)).astype(np.float32)
    rows = np.array(list(product(range(5), repeat=5)))
    centred = (gains - gains.mean())[rows, 0]
    deviation = np.sqrt(np.maximum(centred.var(1), 0.02 * gains.var()))
    t = np.sqrt(5) * centred.mean(1) / deviation
    exact = (t >= np.sqrt(5) * gains.mean() / gains.std() - 1e-4).mean()
    drawn = step_down([gains], draws=40_000)[0][0]
    assert drawn == pytest.approx(exact, abs=4 * np.sqrt(0.25 / 40_000))


def test_a_gain_below_zero_is_never_a_discovery():
    gains = null_data(np.random.default_rng(0)) - 3.0
    assert step_down([gains], draws=499)[0].min() > 0.5


def test_p_ranks_columns_far_below_one_over_the_resamples():
    rng = np.random.default_rng(2)
    gains = rng.normal(0.0, 1.0, (120, 500)).astype(np.float32)
    gains[:, :3] += np.array([0.6, 0.8, 1.2], np.float32)
    p = step_down([gains], draws=4000)[0]
    assert 0 < p[2] < p[1] < p[0] < 0.05
    assert p[1] < 0.05 / 500


@pytest.mark.parametrize("draw", ["standard_normal", "standard_exponential", "standard_t"])
def test_the_fitted_tail_is_never_far_below_the_truth(draw):
    rng = np.random.default_rng(6)
    more = (8,) if draw == "standard_t" else ()
    drawn, many = (getattr(rng, draw)(*more, (size, 20)).max(1) for size in (4000, 1_000_000))
    for beyond in (1e-3, 1e-4, 1e-5):
        t = np.quantile(many, 1 - beyond)
        share = tail_shares(np.array([t]), drawn)[0]
        assert beyond / 4 < share < beyond * (60 if draw == "standard_normal" else 6)


def test_columns_of_zeros_and_equal_columns():
    rng = np.random.default_rng(1)
    column = rng.normal(2.0, 1.0, (40, 1)).astype(np.float32)
    gains = np.concatenate([column, column, np.zeros_like(column), 4 * column], axis=1)
    p = step_down([gains], draws=999)[0]
    assert p[0] == p[1] == p[3] < 1 / 1000
    assert p[2] > 0.4
    # Zeros alone: every resample reaches the observed value.
    assert step_down([np.zeros((40, 3), np.float32)], draws=99)[0].tolist() == [1.0] * 3
    # Equal gains have no deviation, and a p all the same.
    assert 0 < step_down([np.ones((40, 1), np.float32)], draws=999)[0][0] < 0.01


@pytest.mark.parametrize("gain", [5 / 6, 0.8319444, 0.2, 7.0])
def test_a_gain_that_is_equal_in_all_texts_is_found(gain):
    """Its resamples differ by rounding alone, and no t may be computed from that."""
    gains = np.full((30, 2), gain, np.float32)
    assert (step_down([gains], [np.array([-1.0, -1.0])], draws=400)[0] < 0.01).all()


def test_no_hypotheses_have_no_p():
    p = step_down([np.zeros((40, 0), np.float32), np.ones((35, 1), np.float32)], draws=99)
    assert [len(values) for values in p] == [0, 1]
    assert [len(values) for values in step_down([np.zeros((40, 0), np.float32)])] == [0]


@given(seeds)
def test_reordering_hypotheses_reorders_their_p(seed):
    rng = np.random.default_rng(seed)
    gains = null_data(rng, texts=33, questions=9) + 2.0
    order = rng.permutation(9)
    p = step_down([gains], draws=199)[0]
    np.testing.assert_array_equal(step_down([gains[:, order]], draws=199)[0], p[order])


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


def hypotheses(value, count, nulls):
    """The hypotheses of one role, from arrays of texts and heads."""
    role = Role("r", "", lambda text: (), "word")
    nulls = {name: sums[:, None] for name, sums in nulls.items()}
    names = {name: [name] for name in nulls}
    return Hypotheses(value[:, None], count[:, None], nulls, (role,), names)


def test_a_case_worked_out_by_hand():
    # 40 texts of 2 queries: hits 3 of 4, a heuristic 1 of 2, chance 1 of 10.
    value = np.tile([[2.0], [1.0]], (20, 1)).astype(np.float32)
    count = np.full((40, 1), 2.0, np.float32)
    nulls = {"chance": count / 10, "rule": count / 2, "absent": np.full_like(count, np.nan)}
    (tested,) = run_tests([hypotheses(value, count, nulls)], draws=999)
    assert tested["effect"][0] == pytest.approx(0.75)
    assert tested["null"][0] == "rule"
    assert tested["baseline"][0] == pytest.approx(0.5)
    assert tested["lift"][0] == pytest.approx(0.5)  # (.75 − .5) / (1 − .5)
    assert (tested["n"][0], tested["texts"][0]) == (80, 40)
    assert tested["ci_low"][0] < 0.75 < tested["ci_high"][0]
    assert 0 < tested["p_adj"][0] < 1 / 1000
    rates = [tested[f"null.{null}"][0] for null in nulls]
    np.testing.assert_allclose(rates, [0.1, 0.5, np.nan])


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
    (tested,) = run_tests([hypotheses(count.copy(), count, {"chance": count / 10})], draws=99)
    assert tested["effect"][0] == pytest.approx(1.0)
    assert np.isnan(tested["p_adj"][0]) != judged


def test_a_hypothesis_without_queries_is_nan_and_not_zero():
    nothing = np.zeros((40, 1), np.float32)
    (tested,) = run_tests([hypotheses(nothing, nothing, {"chance": nothing})], draws=9)
    unknown = ["effect", "ci_low", "ci_high", "baseline", "lift", "p_adj"]
    assert tested[unknown].isna().all(axis=None)
    assert (tested["null"][0], tested["n"][0]) == ("", 0)


@given(seeds)
def test_the_order_of_texts_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    value, count = drawn_scores(rng, 35, 0.4)
    order = rng.permutation(35)
    (first,) = run_tests([hypotheses(value, count, {"chance": count / 3})], draws=9)
    (second,) = run_tests(
        [hypotheses(value[order], count[order], {"chance": count[order] / 3})], draws=9
    )
    for name in ("effect", "baseline", "lift", "n", "texts", "null.chance"):
        np.testing.assert_allclose(first[name], second[name], rtol=1e-5)


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


def selected_family(rng, texts, rates, shown, role):
    """Queries that are right at one rate per head, against a null that is right half the time."""
    count = np.ones((texts, len(rates)), np.float32)
    value = (rng.random(count.shape) < rates).astype(np.float32)
    null = np.repeat((rng.random((texts, 1)) < 0.5).astype(np.float32), len(rates), 1)
    measures = {"chosen_half": np.array([shown]), "chosen_baseline": np.full((1, len(rates)), 0.5)}
    family = hypotheses(value, count, {"rule": null})
    return replace(family, roles=(role,), measures=measures)


def test_heads_that_differ_from_the_null_in_one_text_do_not_hide_a_better_one():
    # Without that text a resample of their gains varies so little that its t is large.
    rng = np.random.default_rng(0)
    role = Role("r", "", lambda text: (), "word", bar=0.1, points=0.1)
    family = selected_family(rng, 200, np.full(301, 0.8), [0.8] + 300 * [0.5], role)
    family.value[..., 1:] = family.nulls["rule"][..., 1:]
    family.value[family.value[:, 0, 1].argmax(), :, 1:] = 0
    everything = replace(family, measures={"chosen_half": family.measures["chosen_half"]})
    (whole,), (chosen,) = run_tests([everything], draws=500), run_tests([family], draws=500)
    assert chosen["p_adj"][0] < 0.001 < 0.05 < whole["p_adj"][0]
    assert (chosen["p_adj"][1:] == 1).all()
    assert has_role(family, chosen).tolist() == [True] + 300 * [False]


@pytest.mark.full
def test_what_the_selection_half_promises_by_chance_is_rarely_found():
    # No head is better than the null; those that the selection half favours are tested alone.
    role = Role("r", "", lambda text: (), "word", bar=0.1, points=0.1)
    wrong = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        shown = rng.binomial(60, 0.5, 100) / 60
        family = selected_family(rng, 60, np.full(100, 0.5), shown, role)
        (tested,) = run_tests([family], draws=300, seed=seed, intervals=False)
        assert 10 < is_promising(family).sum() < 60
        wrong += (tested["p_adj"] <= 0.05).any()
    assert wrong <= 16  # .05 is promised; more than 16 of 200 has a probability of .02
