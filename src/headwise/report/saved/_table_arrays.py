"""A table of statistics and curves as JSON content and named arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headwise.report.saved._json_values import text_of, texts_of
from headwise.report.saved._named_arrays import NamedArrays
from headwise.tables import COLUMNS, Curves, Head, HeadTable, TextSums, Totals

# A grid of heads is drawn, which takes memory for each number up to the last.
_MOST_HEADS = 2**14
_PARTS = 3  # of the sums of each text: count, total, even


def put_table(table: HeadTable, arrays: NamedArrays) -> dict[str, Any]:
    """Add the numbers of a table to the arrays; return the rest of it."""
    arrays.put("kv_heads", table.kv_heads, np.int64)
    if table.covered is not None:
        arrays.put("covered", table.covered)
    for number, totals in enumerate(table.totals.values()):
        arrays.put(f"totals.{number}", [getattr(totals, name) for name in COLUMNS])
        if totals.per_text is not None:
            arrays.put(f"per_text.{number}", totals.per_text.parts)
    return {
        "heads": [str(head) for head in table.heads],
        "statistics": list(table.statistics),
        "queries": table.queries,
        "model": table.model,
        "versions": dict(table.versions),
        "original": [None if head is None else str(head) for head in table.original],
    }


def get_table(content: Mapping[str, Any], arrays: NamedArrays) -> HeadTable:
    """The table that `put_table` took apart.

    Raises:
        KeyError, TypeError, ValueError: content or arrays are of the wrong form.
    """
    heads = tuple(Head.parse(name) for name in content["heads"])
    if not heads or len(set(heads)) < len(heads):
        raise ValueError(f"{len(heads)} rows of {len(set(heads))} heads")
    last = max(max(head.layer, head.head) for head in heads)
    if last >= _MOST_HEADS:
        raise ValueError(f"a layer or head with the number {last}; below {_MOST_HEADS} are read")
    original = tuple(name if name is None else Head.parse(name) for name in content["original"])
    if original and len(original) != len(heads):
        raise ValueError(f"{len(original)} original addresses of {len(heads)} heads")
    names = texts_of(content["statistics"])
    if len(set(names)) < len(names):
        raise ValueError(f"a statistic is listed twice in {names}")
    return HeadTable(
        heads=heads,
        kv_heads=arrays.get("kv_heads", len(heads), dtype=np.int64),
        totals={name: _totals(number, len(heads), arrays) for number, name in enumerate(names)},
        covered=arrays.get("covered", 2, len(heads)) if "covered" in arrays else None,
        queries=text_of(content["queries"]),
        model=text_of(content["model"]),
        versions={name: text_of(version) for name, version in content["versions"].items()},
        original=original,
    )


def put_curves(curves: Curves, arrays: NamedArrays) -> dict[str, Any]:
    """Add the numbers of curves to the arrays; return the rest of them."""
    arrays.put("curves.removed", curves.removed, np.int64)
    for kind, by_name in (("losses", curves.per_text), ("scores", curves.scores)):
        for number, values in enumerate(by_name.values()):
            arrays.put(f"curves.{kind}.{number}", values)
    return {
        "losses": list(curves.per_text),
        "scores": list(curves.scores),
        "n_heads": curves.n_heads,
        "loss": curves.loss,
        "compares": curves.compares,
        "score": curves.score,
    }


def get_curves(content: Mapping[str, Any], arrays: NamedArrays) -> Curves:
    """The curves that `put_curves` took apart.

    Raises:
        KeyError, TypeError, ValueError: content or arrays are of the wrong form.
    """
    removed = arrays.get("curves.removed", None, dtype=np.int64)
    losses, scores = (
        {
            text_of(name): arrays.get(f"curves.{kind}.{number}", *shape)
            for number, name in enumerate(content[kind])
        }
        for kind, shape in (
            ("losses", (None, len(removed), None)),
            ("scores", (None, len(removed))),
        )
    )
    n_heads, compares = content["n_heads"], content["compares"]
    if type(n_heads) is not int or not isinstance(compares, bool) or not removed[-1] <= n_heads:
        raise ValueError(f"curves of {n_heads!r:.40} heads, compares {compares!r:.40}")
    if not losses or any(
        0 in values.shape or not np.isfinite(values).all() for values in losses.values()
    ):
        raise ValueError("a curve without losses")
    loss, score = text_of(content["loss"]), text_of(content["score"])
    if set(scores) - set(losses) or (score and set(scores) != set(losses)):
        raise ValueError(f"scores of {sorted(scores)}, losses of {sorted(losses)}")
    return Curves(removed, n_heads, losses, loss, compares, score, scores)


def _totals(number: int, n_heads: int, arrays: NamedArrays) -> Totals:
    name = f"per_text.{number}"
    kept = arrays.get(name, _PARTS, None, n_heads) if name in arrays else None
    sums = arrays.get(f"totals.{number}", len(COLUMNS), n_heads)
    columns = dict(zip(COLUMNS, sums, strict=True))
    return Totals(**columns, per_text=None if kept is None else TextSums(*kept))
