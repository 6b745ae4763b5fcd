"""The numbers that the page's script reads: rounded, and maps packed into bytes."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from headwise.report._findings import significant_findings
from headwise.report._study_data import Sample, Side, StudyData
from headwise.report.page._role_table import roles_of_heads
from headwise.report.page._visible_text import visible, visible_token
from headwise.tables import STATISTICS, Head

# The most bytes of numbers and maps: with everything else a page stays below 3 MB.
MAX_BYTES = 2_850_000

Payload = dict[str, Any]


def payload(study: StudyData) -> Payload:
    """All the data that the page's script reads.

    Samples that would make the page too large are left out, from the last; `left_out` counts
    them. NaN becomes None.
    """
    heads, statistics = study.table.heads, applicable_statistics(study)
    data: Payload = {
        "heads": [str(head) for head in heads],
        "stacks": [head.stack for head in heads],
        "layers": [head.layer for head in heads],
        "columns": [head.head for head in heads],
        "statistics": [_statistic(study, name) for name in statistics],
        "findings": [
            {
                "head": heads.index(finding.head),
                "statistic": statistics.index(finding.statistic),
            }
            for finding in significant_findings(study.table, study.meanings, study.whole_texts)
        ],
        "roles": roles_of_heads(study),
        "samples": [],
        "left_out": len(study.samples),
    }
    bytes_left = MAX_BYTES - len(as_json(data))
    for sample in study.samples:
        packed = _sample(sample, heads)
        bytes_left -= len(as_json(packed))
        if bytes_left < 0:
            break
        data["samples"].append(packed)
        data["left_out"] -= 1
    return data


def applicable_statistics(study: StudyData) -> list[str]:
    """The statistics that apply to at least one head."""
    table = study.table
    return [name for name in table.statistics if np.isfinite(table.mean(name)).any()]


def as_json(data: Payload) -> str:
    """JSON that is safe inside a script element: ASCII, without `<`, `>` and `&`."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _statistic(study: StudyData, name: str) -> Payload:
    table, built_in = study.table, STATISTICS.get(name)
    requested = name in study.meanings
    return {
        "name": visible(name),
        "unit": built_in.unit if built_in else "share" if requested else "",
        "meaning": visible(built_in.meaning if built_in else study.meanings.get(name, "")),
        "requested": requested,
        "from_zero": built_in.low == 0 if built_in else requested,
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
    """The tokens, the cells of each view, and the weights of each head in those cells.

    A view shows the queries of one text as rows and the keys of the same or another text as
    columns. `cells` has a row for each query and a character for each key: `.` is not visible,
    `1` is the only visible key, `+` is one of several. Maps hold the `+` cells only, each as a
    byte that counts 255ths of the head's `peak`.
    """
    sides = [sample.sides(head) for head in heads]
    cells = {pair: _cells(sample, *pair) for pair in dict.fromkeys(sides)}
    packed: list[tuple[float | None, str | None]] = []
    for head, pair in zip(heads, sides, strict=True):
        weights = sample.weights.get(head)
        if weights is None or weights.shape != cells[pair].shape:
            packed.append((None, None))
        else:
            packed.append(_map(weights, cells[pair] == "+"))
    return {
        "tokens": [visible_token(token) for token in sample.tokens],
        "views": [
            {
                "sides": [*pair],
                "queries": [visible_token(token) for token in sample.side(pair[0])],
                "keys": [visible_token(token) for token in sample.side(pair[1])],
                "cells": ["".join(row) for row in grid],
            }
            for pair, grid in cells.items()
        ],
        "view": [[*cells].index(pair) for pair in sides],
        "peaks": [peak for peak, _ in packed],
        "maps": [data for _, data in packed],
    }


def _cells(sample: Sample, queries: Side, keys: Side) -> np.ndarray:
    """Which keys each query sees, and whether it sees more than one."""
    shape = len(sample.side(queries)), len(sample.side(keys))
    visible_keys = np.zeros(shape, dtype=bool)
    for head, weights in sample.weights.items():
        # One head may give no weight to a visible key, so all heads are combined.
        if sample.sides(head) == (queries, keys) and weights.shape == shape:
            visible_keys |= weights > 0
    only_key = visible_keys.sum(1, keepdims=True) == 1
    return np.where(visible_keys, np.where(only_key, "1", "+"), ".")


def _map(
    weights: Float[np.ndarray, "T S"], stored: Bool[np.ndarray, "T S"]
) -> tuple[float | None, str | None]:
    if not np.isfinite(weights).all():
        return None, None
    values = weights[stored].astype(np.float64)
    # Rounded first, so that the page multiplies by exactly the number divided by here; rounded
    # up, so that no weight exceeds 255.
    peak = float(np.ceil(values.max(initial=0.0) * 1e6) / 1e6) or 1.0
    data = np.rint(values / peak * 255).astype(np.uint8)
    return peak, base64.b64encode(data.tobytes()).decode("ascii")
