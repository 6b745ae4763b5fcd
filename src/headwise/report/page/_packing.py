"""Attention on texts as bytes: exact maps of short texts, the strongest pairs of long ones."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from headwise.report._samples import Sample, Side, TopPairs
from headwise.report.page._visible_text import visible_token
from headwise.tables import Head

# Characters of a token on the page: more would not fit on a line.
_TOKEN_LENGTH = 60
_BYTE = 255

Payload = dict[str, Any]
Packed = list[Any]  # the peak and the bytes in base64


def pack_samples(
    samples: Sequence[Sample],
    heads: Sequence[Head],
    order: Sequence[Head],
    max_bytes: int | None = None,
) -> list[Payload]:
    """The samples as the page reads them, as far as they fit.

    Every text has an equal share of the remaining bytes. Within it the tokens come first, then what
    the keys of each layer receive, then heads in `order`. A text whose tokens do not fit ends the
    list.

    Args:
        heads: All heads in the order of the page, which refers to them by position.
        max_bytes: How large all samples may be together; None is without a limit.
    """
    place = {head: str(index) for index, head in enumerate(heads)}
    packed: list[Payload] = []
    for index, sample in enumerate(samples):
        share = None if max_bytes is None else max_bytes // (len(samples) - index)
        data = _pack(sample, heads, share)
        if data is None:
            break
        room = None if share is None else share - _size(data)
        _add_heads(data, sample, order, place, room)
        if max_bytes is not None:
            max_bytes -= _size(data)
        packed.append(data)
    return packed


def _pack(sample: Sample, heads: Sequence[Head], max_bytes: int | None) -> Payload | None:
    """The tokens and what each layer's keys receive; None if not even the tokens fit.

    A view shows the queries of one text as rows and the keys of the same or another text as
    columns. `cells` has a row for each query and a character for each key: `.` is not visible,
    `1` is the only visible key, `+` is one of several; a long text has no cells. Maps hold the
    `+` cells only, each as a byte that counts 255ths of the head's peak.
    """
    sides = {head.stack: sample.sides(head) for head in heads}
    views = list(dict.fromkeys(sides.values()))
    data: Payload = {
        "tokens": [_shown(token) for token in sample.tokens],
        "targets": [_shown(token) for token in sample.targets],
        "views": [
            {"sides": [*pair], "cells": _cell_rows(sample, *pair) if sample.weights else None}
            for pair in views
        ],
        "view": {stack: views.index(pair) for stack, pair in sides.items()},
        "maps": {},
        "pairs": {},
        "received": {},
        "missing": 0,
    }
    if max_bytes is not None and _size(data) > max_bytes:
        return None
    received = {
        f"{stack} {layer}": _bytes_of(values) for (stack, layer), values in sample.received.items()
    }
    if max_bytes is None or _size(data) + len(json.dumps(received)) < max_bytes // 2:
        data["received"] = received
    return data


def _add_heads(
    data: Payload,
    sample: Sample,
    order: Sequence[Head],
    place: Mapping[Head, str],
    room: int | None,
) -> None:
    """Add the maps or the pairs of the heads, as far as they fit."""
    stored = {
        tuple(view["sides"]): np.array([[*row] for row in view["cells"]]) == "+"
        for view in data["views"]
        if view["cells"]
    }
    for head in order:
        kind, content = "maps", _map_bytes(sample, head, stored.get(sample.sides(head)))
        if head not in sample.weights:
            kind, content = "pairs", _pair_bytes(sample.pairs.get(head))
        if content is None:
            continue
        size = len(place[head]) + len(content[1]) + 24
        if room is not None and size > room:
            data["missing"] += 1
            continue
        room = None if room is None else room - size
        data[kind][place[head]] = content
    if not sample.weights:  # heads whose pairs were not even recorded
        data["missing"] = len(order) - len(data["pairs"])


def _map_bytes(sample: Sample, head: Head, cells: Bool[np.ndarray, "T S"] | None) -> Packed | None:
    weights = sample.weights.get(head)
    if weights is None or cells is None or weights.shape != cells.shape:
        return None
    return _bytes_of(weights[cells]) if np.isfinite(weights).all() else None


def _shown(token: str) -> str:
    """The token made visible; the middle of a very long one is left out."""
    if len(token) > _TOKEN_LENGTH:
        half = _TOKEN_LENGTH // 2
        return f"{visible_token(token[:half])}…{visible_token(token[-half:])}"
    return visible_token(token)


def _cell_rows(sample: Sample, queries: Side, keys: Side) -> list[str]:
    """Which keys each query sees, and whether it sees more than one."""
    shape = len(sample.side(queries)), len(sample.side(keys))
    visible_keys = np.zeros(shape, dtype=bool)
    for head, weights in sample.weights.items():
        # One head may give no weight to a visible key, so all heads are combined.
        if sample.sides(head) == (queries, keys) and weights.shape == shape:
            visible_keys |= weights > 0
    only_key = visible_keys.sum(1, keepdims=True) == 1
    return ["".join(row) for row in np.where(visible_keys, np.where(only_key, "1", "+"), ".")]


def _bytes_of(values: Float[np.ndarray, "..."]) -> Packed:
    peak, levels = _levels(values)
    return [peak, base64.b64encode(levels.tobytes()).decode("ascii")]


def _pair_bytes(pairs: TopPairs | None) -> Packed | None:
    """All keys as 16-bit numbers, little-endian, then all weights as bytes; no key has weight 0."""
    if pairs is None or not np.isfinite(pairs.weights).all() or pairs.keys.max(initial=0) >> 16:
        return None
    peak, levels = _levels(np.where(pairs.keys < 0, 0, pairs.weights))
    keys = np.where(pairs.keys < 0, 0, pairs.keys).astype("<u2")
    return [peak, base64.b64encode(keys.tobytes() + levels.tobytes()).decode("ascii")]


def _levels(values: Float[np.ndarray, "..."]) -> tuple[float, np.ndarray]:
    values = values.astype(np.float64)
    # Rounded first, so that the page multiplies by exactly the number divided by here; rounded
    # up, so that no weight exceeds 255.
    peak = float(np.ceil(values.max(initial=0.0) * 1e6) / 1e6) or 1.0
    return peak, np.rint(values / peak * _BYTE).astype(np.uint8)


def _size(data: Payload) -> int:
    return len(json.dumps(data, separators=(",", ":")))
