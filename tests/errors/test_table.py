"""What a table refuses, by name and value."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import ArgumentError, HeadError, InputError, ShapeError
from headwise.surgery import Plan
from headwise.tables import Head, HeadTable, Scores, Totals, random_orders
from headwise.tables._table_file import read_table_file


def _table(keep: bool) -> HeadTable:
    totals = Totals.of_texts(np.ones((3, 1)), np.ones((3, 1)), np.array([1.0]), keep=keep)
    return HeadTable((Head("", 0, 0),), np.array([0]), {"entropy": totals})


def test_sums_of_texts_must_have_been_kept() -> None:
    with pytest.raises(ArgumentError, match=r"'entropy' in each text.*per_text=True"):
        _table(keep=False).interval("entropy")


@pytest.mark.parametrize("level", [95.0, 0.0])
def test_an_interval_needs_a_level(level: float) -> None:
    with pytest.raises(ArgumentError, match=f"interval.*level={level}"):
        _table(keep=True).interval("entropy", level)


def test_tables_with_and_without_texts_do_not_add() -> None:
    with pytest.raises(ArgumentError, match="only one of the two has per_text"):
        _table(keep=True) + _table(keep=False)


# Impossible scores are refused with the values that are wrong.


HEADS = (Head("", 0, 0), Head("", 0, 1))


def _scores() -> Scores:
    return Scores(HEADS, np.array([0, 1]), np.ones((3, 2)), method="ablation", loss="lm")


@pytest.mark.parametrize(("rows", "texts"), [(3, 2), (2, 0)])
def test_columns_that_do_not_fit_the_heads_are_refused(rows: int, texts: int) -> None:
    with pytest.raises(ShapeError, match=rf"2 heads.*{rows}\]? rows and {texts} texts"):
        Scores(HEADS, np.zeros(rows, np.int64), np.ones((texts, rows)))


def test_zero_random_orders_are_refused() -> None:
    with pytest.raises(ArgumentError, match="n=0"):
        random_orders(HEADS, n=0)


def test_a_head_without_a_score_is_refused() -> None:
    with pytest.raises(HeadError, match=r"no head L1\.H0.*L0\.H0 to L0\.H1"):
        _scores().row("L1.H0")


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    HeadTable(HEADS, np.array([0, 1]), {}).save(path)
    kinds = r"holds a table of statistics \(HeadTable\), not the importance of heads \(Scores\)"
    with pytest.raises(InputError, match=rf"Scores\.load: .*table\.json {kinds}"):
        Scores.load(path)
    path.write_text('{"heads": []}')
    with pytest.raises(InputError, match=r"table\.json has schema None, not 1"):
        Scores.load(path)
    plan = Plan.of("L0.H1", HEADS).save(tmp_path / "plan.json")
    with pytest.raises(
        InputError, match=r"plan\.json is of the format headwise-plan/1, not a table"
    ):
        Scores.load(plan)
    with pytest.raises(InputError, match=r"is a folder\. Give a file"):
        Scores.load(tmp_path)


def test_scores_that_lack_a_text_are_refused(tmp_path: Path) -> None:
    path = _scores().save(tmp_path / "scores.csv")
    path.write_text(path.read_text().replace("text.2", "other"))
    with pytest.raises(InputError, match=r"scores\.csv is incomplete or damaged \('text\.2'\)"):
        Scores.load(path)


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'\.pkl'"):
        _scores().save(tmp_path / "scores.pkl")
    assert list(tmp_path.iterdir()) == []


# A file that describes a far larger table than it can hold is refused before it is read.


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([".parquet", ".csv", ".json"]))
@settings(max_examples=20)
def test_a_table_of_any_shape_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, ending: str
) -> None:
    path = tmp_path_factory.mktemp("table") / f"t{ending}"
    frame = pd.DataFrame({f"c{n}": np.zeros(100 * rows) for n in range(columns)})
    if ending == ".parquet":
        frame.to_parquet(path)
    elif ending == ".csv":
        path.write_text("# {}\n" + frame.to_csv(index=False))
    else:
        path.write_text(json.dumps({"heads": frame.to_dict("records")}))
    read, _ = read_table_file(path)
    assert read.shape == frame.shape
