"""What a table refuses, by name and value."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise.errors import ArgumentError, HeadError, HeadwiseError, InputError, ShapeError
from headwise.files import read_json, write_json
from headwise.surgery import Plan
from headwise.tables import COLUMNS, Head, HeadTable, Scores, Totals, random_orders

HEADS = (Head("", 0, 0), Head("", 0, 1))


def _table(keep: bool) -> HeadTable:
    totals = Totals.of_texts(np.ones((3, 1)), np.ones((3, 1)), np.array([1.0]), keep=keep)
    return HeadTable((Head("", 0, 0),), np.array([0]), {"entropy": totals})


def _scores() -> Scores:
    return Scores(HEADS, np.array([0, 1]), np.ones((3, 2)), method="ablation", loss="lm")


def _damaged(folder: Path) -> Scores:
    path = _scores().save(folder / "scores.csv")
    path.write_text(path.read_text().replace("text.2", "other"))
    return Scores.load(path)


def _changed(folder: Path, change: dict[str, Any]) -> HeadTable:
    path = _table(keep=True).save(folder / "table.json")
    content = read_json(path, "test", "")
    [row] = content["heads"]
    for name, value in change.items():
        (content if name in content else row)[name] = value
    write_json(content, path)
    return HeadTable.load(path)


def _without_schema(folder: Path) -> Scores:
    path = folder / "table.json"
    path.write_text('{"heads": []}')
    return Scores.load(path)


def _unwritten(folder: Path) -> None:
    try:
        _scores().save(folder / "scores.pkl")
    finally:
        assert not any(folder.iterdir())


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"statistics": [1], **{f"1.{part}": 1.0 for part in COLUMNS}, "per_text": False},
     "1 is not a text"),
    ({"covered.queries": 1.0}, "'covered.tokens'"),
    ({"entropy.per_text.count": [1.0, 2.0]}, r"sums of each text of the shapes \[\(2, 1\), \(3"),
    ({"entropy.per_text.total": [1.0, [2.0], 3.0]}, "setting an array element"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), [
    (lambda _: _table(keep=False).interval("entropy"), ArgumentError,
     r"'entropy' in each text.*per_text=True"),
    *((lambda _, level=level: _table(keep=True).interval("entropy", level), ArgumentError,
       f"interval.*level={level}") for level in (95.0, 0.0)),
    (lambda _: _table(keep=True) + _table(keep=False), ArgumentError,
     "only one of the two has per_text"),
    *((lambda _, n=n, texts=texts: Scores(HEADS, np.zeros(n, np.int64), np.ones((texts, n))),
       ShapeError, rf"2 heads.*{n}\]? rows and {texts} texts") for n, texts in ((3, 2), (2, 0))),
    (lambda _: random_orders(HEADS, n=0), ArgumentError, "n=0"),
    (lambda _: _scores().row("L1.H0"), HeadError, r"no head L1\.H0.*L0\.H0 to L0\.H1"),
    (lambda folder: Scores.load(HeadTable(HEADS, np.array([0, 1]), {}).save(folder / "t.json")),
     InputError, r"Scores\.load: .*t\.json holds a table of statistics \(HeadTable\), not the "
     r"importance of heads \(Scores\)"),
    (lambda folder: Scores.load(Plan.of("L0.H1", HEADS).save(folder / "plan.json")), InputError,
     r"plan\.json is of the format headwise-plan/1, not a table"),
    (_without_schema, InputError, r"table\.json has schema None, not 1"),
    (Scores.load, InputError, r"is a folder\. Give a file"),
    *((partial(_changed, change=change), InputError, rf"table\.json is incomplete .*\({said}")
      for change, said in CHANGES),
    (_damaged, InputError, r"scores\.csv is incomplete or damaged \('text\.2'\)"),
    (_unwritten, ArgumentError, r"'\.pkl'"),
])  # fmt: skip
def test_what_no_table_holds(
    call: Callable[[Path], object], kind: type[HeadwiseError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        call(tmp_path)
