"""Tables add in any order, and load equal after saving."""

import numpy as np
import pytest
from hypothesis import given

from headwise.tables import COLUMNS, Head, HeadTable, Totals, ratio_interval
from strategies import tables


def _assert_same(first: HeadTable, second: HeadTable, **tolerance: float) -> None:
    assert first.heads == second.heads
    assert first.statistics == second.statistics
    assert (first.model, first.versions) == (second.model, second.versions)
    np.testing.assert_array_equal(first.kv_heads, second.kv_heads)
    for name in first.statistics:
        for part in COLUMNS:
            actual, expected = (getattr(t.totals[name], part) for t in (first, second))
            np.testing.assert_allclose(actual, expected, **tolerance)
        actual, expected = (t.totals[name].per_text for t in (first, second))
        assert (actual is None) == (expected is None)
        if actual is not None and expected is not None:
            for ours, known in zip(actual.parts, expected.parts, strict=True):
                np.testing.assert_allclose(_sorted(ours), _sorted(known), **tolerance)


def _sorted(texts: np.ndarray) -> np.ndarray:
    return texts[np.lexsort(texts.T[::-1])]


@given(a=tables(), b=tables(), c=tables())
def test_tables_add_in_any_order(a: HeadTable, b: HeadTable, c: HeadTable) -> None:
    _assert_same(a + b, b + a, rtol=0)
    _assert_same((a + b) + c, a + (b + c), rtol=1e-9, atol=1e-12)


@given(table=tables())
def test_row_finds_a_head_in_any_order(table: HeadTable) -> None:
    turned = HeadTable(
        heads=table.heads[::-1],
        kv_heads=table.kv_heads[::-1],
        totals={n: t.select(lambda column: column[::-1]) for n, t in table.totals.items()},
        model=table.model,
        versions=table.versions,
    )
    _assert_same(table + turned, table + table, rtol=0)


@pytest.mark.parametrize("ending", ["parquet", "csv", "json"])
@given(table=tables())
def test_a_saved_file_loads_equal(
    tmp_path_factory: pytest.TempPathFactory, ending: str, table: HeadTable
) -> None:
    path = tmp_path_factory.mktemp("tables") / f"table.{ending}"
    table.save(path)
    _assert_same(HeadTable.load(path), table, rtol=0)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_mean_weighs_rows_not_texts() -> None:
    totals = Totals.of_texts(
        totals=np.array([[2.0], [30.0]]), counts=np.array([[1.0], [3.0]]), maximum=np.array([12.0])
    )
    assert totals.mean() == [8.0]  # 32 / 4, not (2 + 10) / 2
    assert totals.texts == [2.0]


def test_the_standard_error_treats_texts_as_units() -> None:
    rng = np.random.default_rng(0)
    # Rows of one text are copies of each other: they carry no more information than one.
    values = rng.standard_normal((400, 1))
    copied = Totals.of_texts(values * 10, np.full((400, 1), 10.0), np.array([9.0]))
    single = Totals.of_texts(values, np.ones((400, 1)), np.array([9.0]))
    np.testing.assert_allclose(copied.standard_error(), single.standard_error())
    expected = values.std(ddof=1) / np.sqrt(400)
    np.testing.assert_allclose(single.standard_error(), expected, rtol=1e-9)


@given(table=tables())
def test_sums_of_single_texts_add_up(table: HeadTable) -> None:
    for name in table.statistics:
        kept = table.per_text(name)
        np.testing.assert_allclose(kept.count.sum(0), table.count(name))
        np.testing.assert_allclose(kept.total.sum(0), table.totals[name].total, atol=1e-12)
        np.testing.assert_allclose(kept.uniform.sum(0), table.totals[name].uniform)


@given(table=tables())
def test_an_interval_lies_among_the_means_of_texts(table: HeadTable) -> None:
    for name in table.statistics:
        kept = table.per_text(name)
        low, high = table.interval(name)
        several = (kept.count > 0).sum(0) > 1
        np.testing.assert_array_equal(np.isnan(low), ~several)
        np.testing.assert_array_equal(np.isnan(high), ~several)
        for head in np.flatnonzero(several):
            with_rows = kept.count[:, head] > 0
            means = kept.total[with_rows, head] / kept.count[with_rows, head]
            assert means.min() - 1e-9 <= low[head] <= high[head] <= means.max() + 1e-9


def test_the_width_of_an_interval_follows_the_spread_of_texts() -> None:
    rng = np.random.default_rng(0)
    counts = np.full((400, 1), 10.0)
    means = rng.standard_normal((400, 1))
    # Rows of one text are copies of each other: they carry no more information than one.
    totals = Totals.of_texts(means * counts, counts, np.array([9.0]), keep=True)
    table = HeadTable((Head("", 5, 3),), np.array([1]), {"lse": totals})
    low, high = table.interval("lse", level=0.9)
    assert low < means.mean() < high
    expected = 2 * 1.645 * means.std(ddof=1) / 20
    np.testing.assert_allclose(high - low, expected, rtol=0.15)
    wider = table.interval("lse", level=0.99)
    assert wider[0] < low < high < wider[1]


def test_an_interval_of_skewed_texts_holds_the_truth() -> None:
    """Values that grow with the length of a text, as `distance` does, in 30 texts."""
    held = np.zeros(2)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        counts = np.ceil(rng.lognormal(2.5, 0.8, (30, 50)))
        totals = counts**2 * rng.uniform(0.2, 0.4, (30, 50))
        truth = 0.3 * np.exp(2.5 + 1.5 * 0.8**2)  # E(count²) / E(count), without rounding up
        ends = (
            ratio_interval(totals, counts, studentized=studentized, draws=300, seed=seed)
            for studentized in (True, False)
        )
        held += [((low <= truth) & (truth <= high)).mean() / 40 for low, high in ends]
    assert held[0] > 0.78 > 0.7 > held[1]


@pytest.mark.parametrize("right", [0.5, 0.925, 0.975])
def test_an_interval_of_rows_that_count_whole_holds_the_truth(right: float) -> None:
    """Texts that are all right, or all wrong, leave an interval open."""
    values = (np.random.default_rng(0).random((40, 2000)) < right).astype(float)
    heads = tuple(Head("", 0, h) for h in range(2000))
    totals = Totals.of_texts(values, np.ones_like(values), np.ones(2000), keep=True)
    low, high = HeadTable(heads, np.array([1]), {"top(a)": totals}).interval("top(a)")
    # Of few texts, coverage swings with the share.
    assert ((low <= right) & (right <= high)).mean() > 0.92
    assert (high - low).max() < 0.35
    assert (high - low).min() > 0.08


def test_a_statistic_without_rows_is_nan_and_not_zero() -> None:
    nothing = Totals.of_texts(np.zeros((2, 1)), np.zeros((2, 1)), np.array([np.nan]))
    table = HeadTable((Head("", 5, 3),), np.array([1]), {"next": nothing})
    assert np.isnan(table.mean("next"))
    assert np.isnan(table.standard_error("next"))
    assert np.isnan(table.frame(detail=True)["next.max"][0])


def test_the_frame_is_tidy() -> None:
    totals = Totals.of_texts(np.array([[3.0]]), np.array([[2.0]]), np.array([2.0]))
    table = HeadTable((Head("decoder.cross", 5, 3),), np.array([1]), {"entropy": totals})
    frame = table.frame()
    assert list(frame.columns) == ["name", "stack", "layer", "head", "entropy"]
    assert frame.iloc[0].tolist() == ["decoder.cross.L5.H3", "decoder.cross", 5, 3, 1.5]


@given(table=tables(keep=False))
def test_sums_of_a_billion_rows_do_not_drift(table: HeadTable) -> None:
    grown = table
    for _ in range(30):  # twice as many rows each time
        grown = grown + grown
    for name in table.statistics:
        assert (grown.count(name) == table.count(name) * 2**30).all()
        np.testing.assert_array_equal(grown.mean(name), table.mean(name))
        one_more = grown + table  # the smallest next to the largest
        assert (one_more.count(name) - grown.count(name) == table.count(name)).all()
        np.testing.assert_allclose(one_more.mean(name), table.mean(name), rtol=1e-14)
