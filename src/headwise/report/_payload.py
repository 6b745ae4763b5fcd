"""A study as the plain numbers that the page draws: rounded, and maps packed into bytes."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from headwise.report._findings import telling
from headwise.report._roles import roles_of_heads
from headwise.report._study import Sample, Side, Study
from headwise.report._visible_text import visible, visible_token
from headwise.tables import STATISTICS, Head

# What the numbers and the maps may take of a page, in bytes: with the rest it stays below 3 MB.
ROOM = 2_850_000

Payload = dict[str, Any]


def payload(study: Study) -> Payload:
    """All that the page's script reads.

    Samples that would make the page too large are left out, from the last; `left_out` counts
    them. NaN becomes None.
    """
    heads, shown = study.table.heads, applying(study)
    data: Payload = {
        "heads": [str(head) for head in heads],
        "stacks": [head.stack for head in heads],
        "layers": [head.layer for head in heads],
        "places": [head.head for head in heads],
        "statistics": [_statistic(study, name) for name in shown],
        "findings": [
            {
                "head": heads.index(found.head),
                "statistic": shown.index(found.statistic),
            }
            for found in telling(study.table, study.meanings, study.whole_texts)
        ],
        "roles": roles_of_heads(study),
        "samples": [],
        "left_out": len(study.samples),
    }
    room = ROOM - len(as_json(data))
    for sample in study.samples:
        packed = _sample(sample, heads)
        room -= len(as_json(packed))
        if room < 0:
            break
        data["samples"].append(packed)
        data["left_out"] -= 1
    return data


def applying(study: Study) -> list[str]:
    """The statistics that apply to at least one head."""
    table = study.table
    return [name for name in table.statistics if np.isfinite(table.mean(name)).any()]


def as_json(data: Payload) -> str:
    """JSON that is safe inside a script element: ASCII, without the signs that HTML reads."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _statistic(study: Study, name: str) -> Payload:
    table, built_in = study.table, STATISTICS.get(name)
    asked = name in study.meanings
    return {
        "name": visible(name),
        "unit": built_in.unit if built_in else "share" if asked else "",
        "says": visible(built_in.meaning if built_in else study.meanings.get(name, "")),
        "asked": asked,
        "from_zero": built_in.low == 0 if built_in else asked,
        "mean": _rounded(table.mean(name)),
        "error": _rounded(table.standard_error(name), digits=3),
        "count": _rounded(table.count(name), digits=15),
        "maximum": _rounded(table.maximum(name)),
        "even": _rounded(table.even(name)),
    }


def _rounded(column: Float[np.ndarray, " N"], digits: int = 5) -> list[float | int | None]:
    return [_shortest(float(f"{x:.{digits}g}")) if np.isfinite(x) else None for x in column]


def _shortest(number: float) -> float | int:
    return int(number) if number.is_integer() else number


def _sample(sample: Sample, heads: Sequence[Head]) -> Payload:
    """The tokens, which cells there are, and for each head its weights in those cells.

    A view is of one text, or of two: its queries are rows, its keys columns. `cells` has a row
    for each query and a sign for each key: `.` is not visible, `1` is the only key that is, `+`
    is one of several. Maps hold the `+` cells only, each a byte that counts 255ths of the head's
    `peak`.
    """
    sides = [sample.sides(head) for head in heads]
    cells = {both: _cells(sample, *both) for both in dict.fromkeys(sides)}
    packed: list[tuple[float | None, str | None]] = []
    for head, both in zip(heads, sides, strict=True):
        weights = sample.weights.get(head)
        if weights is None or weights.shape != cells[both].shape:
            packed.append((None, None))
        else:
            packed.append(_map(weights, cells[both] == "+"))
    return {
        "tokens": [visible_token(token) for token in sample.tokens],
        "views": [
            {
                "sides": both,
                "queries": [visible_token(token) for token in sample.side(both[0])],
                "keys": [visible_token(token) for token in sample.side(both[1])],
                "cells": ["".join(row) for row in those],
            }
            for both, those in cells.items()
        ],
        "view": [[*cells].index(both) for both in sides],
        "peaks": [peak for peak, _ in packed],
        "maps": [data for _, data in packed],
    }


def _cells(sample: Sample, queries: Side, keys: Side) -> np.ndarray:
    """Which keys each query sees, and whether it has a choice."""
    shape = len(sample.side(queries)), len(sample.side(keys))
    seen = np.zeros(shape, dtype=bool)
    for head, weights in sample.weights.items():
        # A single head may give no weight to a key that it sees: ask all of them.
        if sample.sides(head) == (queries, keys) and weights.shape == shape:
            seen |= weights > 0
    alone = seen.sum(1, keepdims=True) == 1
    return np.where(seen, np.where(alone, "1", "+"), ".")


def _map(
    weights: Float[np.ndarray, "T S"], shown: Bool[np.ndarray, "T S"]
) -> tuple[float | None, str | None]:
    if not np.isfinite(weights).all():
        return None, None
    values = weights[shown].astype(np.float64)
    # Rounded first, so that the page divides by the very number that we divide by; upwards,
    # so that no weight is more than 255 of its 255ths.
    peak = float(np.ceil(values.max(initial=0.0) * 1e6) / 1e6) or 1.0
    data = np.rint(values / peak * 255).astype(np.uint8)
    return peak, base64.b64encode(data.tobytes()).decode("ascii")
