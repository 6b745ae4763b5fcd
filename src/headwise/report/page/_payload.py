"""The data that the page's script reads, without what would make the page too large.

Numbers are rounded. Attention on texts is packed as bytes: exact maps of short texts, and the
strongest pairs of long ones.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
from jaxtyping import Float, Int64

from headwise.report._samples import Sample, Side, TopPairs
from headwise.report._study_data import StudyData
from headwise.report.page._role_table import roles_of_heads
from headwise.report.page._visible_text import visible, visible_token
from headwise.roles import OFFSETS, PREFIX_MATCHING, SAME
from headwise.tables import STATISTICS, Head, statistic_label

# The most bytes of a page, unless all is wanted.
MAX_BYTES = 4_900_000
# Characters of a token on the page: more would not fit on a line.
_TOKEN_LENGTH = 60
_BYTE = 255
_NEAR_THE_BEGINNING = 400  # tokens of a text that may show a role first

Payload = dict[str, Any]
Packed = list[Any]  # the peak and the bytes in base64


def payload(study: StudyData, max_bytes: int | None = MAX_BYTES) -> Payload:
    """All the data that the page's script reads. NaN becomes None.

    Maps and texts that would make the data larger than `max_bytes` are left out: `left_out` counts
    the texts, and each sample the heads whose maps are missing.
    """
    heads, statistics = study.table.heads, applicable_statistics(study)
    order = heads_shown_first(study)
    data: Payload = {
        **addresses(heads),
        "statistics": [_statistic(study, name) for name in statistics],
        "findings": [
            {"head": heads.index(found.head), "statistic": statistics.index(found.statistic)}
            for found in study.significant()
        ],
        "start": heads.index(order[0]),
        "places": {},
        "roles": roles_of_heads(study, [str(head) for head in order], full=max_bytes is None),
        "importance": _importance(study),
        "samples": [],
        "left_out": 0,
        "pair": [],
    }
    bytes_left = math.inf if max_bytes is None else float(max_bytes - len(as_json(data)))
    data["samples"] = pack_samples(study.samples, heads, order, bytes_left)
    data["left_out"] = len(study.samples) - len(data["samples"])
    shown = study.samples[: len(data["samples"])]
    data["places"] = {heads.index(head): place for head, place in _plainest(study, shown).items()}
    return data


def look_payload(sample: Sample, max_bytes: int) -> Payload:
    """The data of a page that shows one text alone: no statistics, no roles."""
    heads = list(sample.weights or sample.pairs)
    sharpest = max(heads, key=lambda head: _sharpness(sample, head))
    first, *pair = sample.linked or (sharpest,)
    order = sorted(heads, key=lambda head: head != first)  # a long text may have no room for all
    return {
        **addresses(heads),
        "statistics": [],
        "findings": [],
        "roles": None,
        "importance": None,
        "left_out": 0,
        "start": heads.index(first),
        "places": {},
        "pair": [[*range(*tokens)] for tokens in pair],
        "samples": pack_samples((sample,), heads, order, float(max_bytes)),
    }


def _sharpness(sample: Sample, head: Head) -> float:
    """How much more each query's own best key gets than the best single key gets from all queries.

    A sink's best key is the same for every query, so that nothing is left of its attention: no
    threshold and no list of tokens tells sinks. What a token gives itself links no words.
    """
    pairs = sample.pairs.get(head)
    if pairs is None:
        weights = sample.weights[head]
        pairs = TopPairs(np.indices(weights.shape, dtype=np.int32)[1], weights)
    queries_of, keys_of = sample.sides(head)
    is_itself = (pairs.keys == np.arange(len(pairs.keys))[:, None]) & (queries_of == keys_of)
    given = np.where(is_itself | (pairs.keys < 0), 0, pairs.weights)
    received = np.bincount(np.maximum(pairs.keys, 0).ravel(), given.ravel())
    return float(given.max(1).mean() - received.max() / len(given))


def addresses(heads: Sequence[Head]) -> Payload:
    """The name and the place of each head."""
    return {
        "heads": [str(head) for head in heads],
        "stacks": [head.stack for head in heads],
        "layers": [head.layer for head in heads],
        "columns": [head.head for head in heads],
    }


def heads_shown_first(study: StudyData) -> list[Head]:
    """All heads: those of findings first, then those with the strongest roles, then the rest.

    The page opens on the first one.
    """
    names = [str(finding.head) for finding in study.significant()]
    if study.roles is not None:
        names += study.roles.found()["name"].tolist()
    heads = {str(head): head for head in study.table.heads}
    return [heads[name] for name in dict.fromkeys([*names, *heads])]


def _plainest(study: StudyData, samples: Sequence[Sample]) -> dict[Head, tuple[int, int]]:
    """The text and the query that show the strongest role of a head most plainly.

    Only of roles that the tokens alone tell, and of heads whose attention on a text is known.
    """
    if study.roles is None:
        return {}
    found = study.roles.found().drop_duplicates("name")
    heads = {str(head): head for head in study.table.heads}
    best: dict[Head, tuple[float, int, int]] = {}
    for role, names in found.groupby("role")["name"]:
        for index, sample in enumerate(samples):
            pairs = {side: _pairs_of(str(role), sample.side(side)) for side in get_args(Side)}
            for head in (heads[name] for name in names):
                queries, keys = sample.sides(head)
                known = head in sample.weights or head in sample.pairs
                if queries == keys and known and len(pairs[queries]):
                    weights = _weights(sample, head, *pairs[queries].T)
                    first = int(weights.argmax())
                    query = int(pairs[queries][first, 0])
                    # Of equal ones the first text, and in it the first query.
                    best[head] = max(
                        best.get(head, (0.0, 0, 0)),
                        (round(float(weights[first]), 2), -index, -query),
                    )
    return {head: (-index, -query) for head, (weight, index, query) in best.items() if weight}


def _pairs_of(role: str, tokens: Sequence[str]) -> Int64[np.ndarray, "N 2"]:
    """The pairs of a role in a text of which only the tokens are known; none for other roles."""
    pairs: list[tuple[int, int]] = []
    tokens = tokens[:_NEAR_THE_BEGINNING]
    for query, token in enumerate(tokens):
        copies = [copy for copy in range(query) if tokens[copy] == token]
        if role == SAME.name:
            pairs += [(query, copy) for copy in copies]
        elif role == PREFIX_MATCHING.name:
            # What followed must not be the token before the query as well.
            pairs += [(query, copy + 1) for copy in copies if copy + 1 < query - 1]
        elif 0 <= query + OFFSETS.get(role, -query - 1) < len(tokens):
            pairs.append((query, query + OFFSETS[role]))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _weights(
    sample: Sample, head: Head, queries: Int64[np.ndarray, " N"], keys: Int64[np.ndarray, " N"]
) -> Float[np.ndarray, " N"]:
    """What a head gives on some pairs; 0 on those that are not among its strongest."""
    if head in sample.weights:
        return sample.weights[head][queries, keys]
    pairs = sample.pairs[head]
    return np.where(pairs.keys[queries] == keys[:, None], pairs.weights[queries], 0).sum(1)


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
        "label": visible(statistic_label(name)),
        "unit": built_in.unit if built_in else "share" if requested else "",
        "meaning": visible(built_in.meaning if built_in else study.meanings.get(name, "")),
        "requested": requested,
        "from_zero": built_in.from_zero if built_in else requested,
        "mean": _rounded(table.mean(name)),
        "error": _rounded(table.standard_error(name), digits=3),
        "count": _shared(_rounded(table.count(name), digits=15)),
        "maximum": _shared(_rounded(table.maximum(name), digits=4)),
        "even": _shared(_rounded(table.uniform(name), digits=4)),
    }


def _importance(study: StudyData) -> Payload | None:
    """The importance of each head with its interval; None for heads without a score."""
    scores = study.scores
    if scores is None:
        return None
    rows = {head: row for row, head in enumerate(scores.heads)}
    columns = zip(scores.importance, *scores.interval(), strict=True)
    values = [_rounded(np.array(column), digits=4) for column in columns]
    return {
        "method": visible(scores.method),
        "loss": visible(scores.loss),
        "values": [values[rows[head]] if head in rows else None for head in study.table.heads],
    }


def _rounded(column: Float[np.ndarray, " N"], digits: int = 5) -> list[float | int | None]:
    """Numbers as JSON can hold them: NaN becomes None, and whole numbers have no point."""
    numbers = (float(f"{x:.{digits}g}") if np.isfinite(x) else None for x in column)
    return [int(x) if x is not None and x.is_integer() else x for x in numbers]


def _shared(column: list[float | int | None]) -> list[float | int | None] | float | int | None:
    """The column, or its one value if all heads share it."""
    return column[0] if len(column) > 1 and len(set(column)) == 1 else column


def pack_samples(
    samples: Sequence[Sample],
    heads: Sequence[Head],
    order: Sequence[Head],
    max_bytes: float,
) -> list[Payload]:
    """The samples as the page reads them, as far as they fit.

    Every text has an equal share of the remaining bytes. Within it the tokens come first, then what
    the keys of each layer receive, then heads in `order`. A text whose tokens do not fit ends the
    list.

    Args:
        heads: All heads in the order of the page, which refers to them by position.
        max_bytes: How large all samples may be together.
    """
    place = {head: str(index) for index, head in enumerate(heads)}
    packed: list[Payload] = []
    for index, sample in enumerate(samples):
        # What a text leaves of its share goes to those after it.
        share = max_bytes / (len(samples) - index)
        data = _pack(sample, heads, share)
        if data is None:
            break
        _add_heads(data, sample, order, place, share - _size(data))
        max_bytes -= _size(data)
        packed.append(data)
    return packed


def _pack(sample: Sample, heads: Sequence[Head], max_bytes: float) -> Payload | None:
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
    if _size(data) > max_bytes:
        return None
    received = {
        f"{stack} {layer}": bytes_of(values) for (stack, layer), values in sample.received.items()
    }
    if _size(data) + len(json.dumps(received)) < max_bytes / 2:
        data["received"] = received
    return data


def _add_heads(
    data: Payload,
    sample: Sample,
    order: Sequence[Head],
    place: Mapping[Head, str],
    room: float,
) -> None:
    """Add the maps or the pairs of the heads, as far as they fit."""
    stored = {
        tuple(view["sides"]): np.array([[*row] for row in view["cells"]]) == "+"
        for view in data["views"]
        if view["cells"]
    }
    for head in order:
        weights, cells = sample.weights.get(head), stored.get(sample.sides(head))
        content = None
        if weights is None:
            content = _pair_bytes(sample.pairs.get(head))
        elif cells is not None and weights.shape == cells.shape and np.isfinite(weights).all():
            content = bytes_of(weights[cells])
        if content is None:
            continue
        size = len(place[head]) + len(content[1]) + 24
        if size > room:
            data["missing"] += 1
            continue
        room -= size
        data["pairs" if weights is None else "maps"][place[head]] = content
    if not sample.weights:  # heads whose pairs were not even recorded
        data["missing"] = len(order) - len(data["pairs"])


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


def bytes_of(values: Float[np.ndarray, "..."]) -> Packed:
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
