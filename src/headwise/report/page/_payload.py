"""The numbers that the page's script reads: rounded, and without what would make it too large."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from headwise.report._samples import Sample
from headwise.report._study_data import StudyData
from headwise.report.page._packing import pack_samples
from headwise.report.page._role_table import roles_of_heads
from headwise.report.page._visible_text import visible
from headwise.tables import STATISTICS, Head, statistic_label

# The most bytes of a page, unless all is wanted.
MAX_BYTES = 4_900_000

Payload = dict[str, Any]


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
        "roles": roles_of_heads(study, [str(head) for head in order], full=max_bytes is None),
        "importance": _importance(study),
        "samples": [],
        "left_out": 0,
    }
    bytes_left = None if max_bytes is None else max_bytes - len(as_json(data))
    data["samples"] = pack_samples(study.samples, heads, order, bytes_left)
    data["left_out"] = len(study.samples) - len(data["samples"])
    return data


def look_payload(sample: Sample, max_bytes: int) -> Payload:
    """The data of a page that shows one text alone: no statistics, no roles."""
    heads = list(sample.weights or sample.pairs)
    nothing = {"statistics": [], "findings": [], "start": 0, "roles": None, "importance": None}
    samples = pack_samples((sample,), heads, heads, max_bytes)
    return {**addresses(heads), **nothing, "samples": samples, "left_out": 0}


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
    rank = {name: place for place, name in reversed(list(enumerate(names)))}
    return sorted(study.table.heads, key=lambda head: rank.get(str(head), len(names)))


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
        "from_zero": built_in.low == 0 if built_in else requested,
        "mean": _rounded(table.mean(name)),
        "error": _rounded(table.standard_error(name), digits=3),
        "count": _shared(_rounded(table.count(name), digits=15)),
        "maximum": _shared(_rounded(table.maximum(name), digits=4)),
        "even": _shared(_rounded(table.even(name), digits=4)),
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
