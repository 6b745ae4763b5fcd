"""Scores: coverage of intervals over texts, orders, saving and loading."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import ArgumentError
from headwise.tables import Head, Scores, bootstrap_means, random_orders
from strategies import seeds


@st.composite
def scores(draw: st.DrawFn) -> Scores:
    rng = np.random.default_rng(draw(seeds))
    texts, heads = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    return Scores(
        heads=tuple(Head("", head // 3, head % 3) for head in range(heads)),
        kv_heads=rng.integers(0, 3, heads),
        per_text=rng.standard_normal((texts, heads)),
        rounds=draw(st.sampled_from([None, rng.integers(0, 3, heads)])),
        method="half-gate",
        loss="embedding",
        over=draw(st.sampled_from(["texts", "seeds"])),
        model="model",
        versions={"torch": "1"},
    )


def _spread(per_text: np.ndarray) -> Scores:
    heads = tuple(Head("", 0, head) for head in range(per_text.shape[1]))
    return Scores(heads, np.arange(len(heads)), per_text)


@pytest.mark.parametrize("ending", ["parquet", "csv", "json"])
@given(saved=scores())
def test_a_saved_file_loads_equal(
    tmp_path_factory: pytest.TempPathFactory, ending: str, saved: Scores
) -> None:
    path = tmp_path_factory.mktemp("scores") / f"scores.{ending}"
    loaded = Scores.load(saved.save(path))
    assert loaded.heads == saved.heads
    for name in ("kv_heads", "per_text", "round"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(saved, name))
    for name in ("method", "loss", "over", "model", "versions"):
        assert getattr(loaded, name) == getattr(saved, name)
    assert (loaded.rounds is None) == (saved.rounds is None)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@given(any_scores=scores())
def test_the_order_is_by_round_then_by_importance(any_scores: Scores) -> None:
    order = any_scores.order()
    assert sorted(order) == sorted(any_scores.heads)
    rows = [any_scores.row(head) for head in order]
    keys = [(any_scores.round[row], any_scores.importance[row]) for row in rows]
    assert keys == sorted(keys)


def test_the_interval_covers_the_true_mean_at_its_level() -> None:
    rng = np.random.default_rng(0)
    # One column, one experiment: 400 of them, with the skew that real importances have.
    low, high = _spread(rng.exponential(2.0, (60, 400))).interval()
    covered = np.mean((low <= 2.0) & (high >= 2.0))
    assert 0.89 < covered < 0.97  # the percentile interval is a little short for skewed values


def test_the_interval_of_one_text_is_unknown() -> None:
    frame = _spread(np.ones((1, 3))).frame()
    assert frame[["ci_low", "ci_high"]].isna().all(axis=None)
    assert (frame["importance"] == 1).all()


def test_columns_share_their_draws() -> None:
    values = np.random.default_rng(1).standard_normal((20, 1))
    means = bootstrap_means(np.hstack([values, values + 3.0]))
    np.testing.assert_allclose(means[:, 1] - means[:, 0], 3.0)


def test_random_orders_differ_and_are_repeatable() -> None:
    heads = [Head("", layer, head) for layer in range(3) for head in range(5)]
    orders = random_orders(heads, n=7)
    assert all(sorted(order) == heads for order in orders)
    assert len({tuple(order) for order in orders}) == 7
    assert orders == random_orders(heads[::-1], n=7)
    assert orders != random_orders(heads, n=7, seed=1)


def test_every_head_comes_first_equally_often() -> None:
    heads = [Head("", 0, head) for head in range(5)]
    firsts = [order[0].head for order in random_orders(heads, n=5000)]
    assert np.abs(np.bincount(firsts) - 1000).max() < 120  # 4 standard deviations


@given(any_scores=scores())
def test_per_layer_gives_every_layer_the_same_norm(any_scores: Scores) -> None:
    alike = any_scores.per_layer()
    for layer in {head.layer for head in any_scores.heads}:
        rows = [row for row, head in enumerate(any_scores.heads) if head.layer == layer]
        assert np.linalg.norm(alike.importance[rows]) == pytest.approx(1.0)
        ratio = alike.per_text[:, rows] / any_scores.per_text[:, rows]
        np.testing.assert_allclose(ratio, ratio[0, 0])
    assert alike.method == "half-gate per layer"


def test_a_layer_of_zeros_stays_zero() -> None:
    assert (_spread(np.zeros((2, 3))).per_layer().importance == 0).all()


def test_redrawn_orders_vary_as_much_as_the_texts_do() -> None:
    rng = np.random.default_rng(0)
    means = np.array([0.0, 0.05, 3.0, 3.05, 9.0])
    orders = _spread(means + rng.standard_normal((40, 5))).redrawn_orders(200)
    assert len(orders) == 200
    assert {frozenset(order) for order in orders} == {frozenset(Head("", 0, n) for n in range(5))}
    first = np.mean([order[0].head == 0 for order in orders])
    assert 0.05 < first < 0.95  # the texts do not decide between two heads alike
    assert {order[4].head for order in orders} == {4}  # but all agree on the last
    # Without noise every order is that of the scores.
    exact = _spread(np.tile(means, (40, 1)))
    assert exact.redrawn_orders(5) == [exact.order()] * 5


def test_redrawn_orders_keep_rounds() -> None:
    per_text = np.random.default_rng(1).standard_normal((9, 4))
    heads = tuple(Head("", 0, head) for head in range(4))
    scores = Scores(heads, np.arange(4), per_text, rounds=np.array([1, 0, 1, 0]))
    for order in scores.redrawn_orders(20):
        assert {head.head for head in order[:2]} == {1, 3}


@pytest.mark.parametrize(("texts", "n"), [(1, 5), (3, 0)])
def test_orders_cannot_be_redrawn_from_one_text(texts: int, n: int) -> None:
    with pytest.raises(ArgumentError, match=f"n={n} of {texts} texts"):
        _spread(np.ones((texts, 3))).redrawn_orders(n)
