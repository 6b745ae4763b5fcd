"""Pictures that need no script: where the squares of heads, and the points of curves lie."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, isfinite, log10
from typing import Any, NamedTuple

import numpy as np

from headwise._display import counted
from headwise.report._study_data import StudyData
from headwise.report.page._visible_text import visible
from headwise.tables import Curves, Head

# The side of a cell and the gap beside it, by the number of heads in a layer.
_SIDES = ((16, 30, 4), (32, 22, 3), (10**6, 14, 2))
_SMALL = 14  # the side of a cell without room for a letter
_LABELS = 46  # left of the cells and above them
_PALEST = 0.25
_DARK = 0.18  # of relative luminance: below it white contrasts more than black
_KEPT = "#5b8db8"
_ROUNDING = 1e-3  # of the distance of two ticks, less than a pixel


class HeadCell(NamedTuple):
    """What a map says about a head: color, letter, a phrase, and whether nothing was tested."""

    color: str
    letter: str
    text: str
    untested: bool = False


def head_maps(
    heads: Sequence[Head], cells: Mapping[str, HeadCell], label: str
) -> list[dict[str, Any]]:
    """A map for each stack, which `parts/head_maps.html` draws; a head without a cell is blank.

    Each square names its head, by the place among `heads`, and says its text to the script.
    """
    stacks = dict.fromkeys(head.stack for head in heads)
    return [_stack_map(stack, heads, cells) | {"label": label} for stack in stacks]


def _stack_map(stack: str, heads: Sequence[Head], cells: Mapping[str, HeadCell]) -> dict[str, Any]:
    members = sorted(head for head in heads if head.stack == stack)
    layers = sorted({head.layer for head in members})
    width = max(head.head for head in members) + 1
    side, gap = next((side, gap) for most, side, gap in _SIDES if width <= most)
    step, every = side + gap, 1 if side > _SMALL else 4  # small cells have no room for each number
    places = {head: index for index, head in enumerate(heads)}
    rows = {layer: _LABELS + step * row for row, layer in enumerate(layers)}
    columns = [_LABELS + step * column for column in range(width)]
    squares = []
    for head in members:
        cell = cells.get(str(head), HeadCell("", "", ""))
        dark = bool(cell.color) and _luminance(cell.color) < _DARK
        square = {
            "x": columns[head.head],
            "y": rows[head.layer],
            "kind": "blank untested" if cell.untested else "blank",
            "ink": ("light" if dark else "dark") if cell.color else "soft",
            "head": places[head],
        }
        squares.append(cell._asdict() | square | ({} if side > _SMALL else {"letter": ""}))
    return {
        "stack": visible(stack),
        "side": side,
        "width": _LABELS + step * width,
        "height": _LABELS + step * len(layers),
        "rows": [*rows.items()][::every],
        "columns": [*enumerate(columns)][::every],
        "squares": squares,
    }


def tint(color: str, strength: float) -> str:
    """The color mixed with white: paler where the strength, 0 … 1, is smaller."""
    share = _PALEST + (1 - _PALEST) * min(max(strength, 0.0), 1.0)
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in _channels(color))


def _channels(color: str) -> list[int]:
    return [int(color[start : start + 2], 16) for start in (1, 3, 5)]


def _luminance(color: str) -> float:
    red, green, blue = ((part / 255) ** 2.2 for part in _channels(color))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def pruning(study: StudyData) -> dict[str, Any] | None:
    """The plan as a map with holes, and the curves; None if the study holds neither."""
    if study.plan is None and study.curves is None:
        return None
    maps: list[dict[str, Any]] = []
    says = ""
    if study.plan is not None:
        gone, heads = set(study.plan.removed), study.table.heads
        removed, kept = HeadCell("", "", "removed", untested=True), HeadCell(_KEPT, "", "kept")
        cells = {str(head): removed if head in gone else kept for head in heads}
        maps = head_maps(heads, cells, "The heads that a plan keeps; holes are removed heads")
        share = f"{len(gone):,} of {counted(len(heads), 'head')}"
        why = f" ({study.plan.why})" if study.plan.why else ""
        says = f"The plan removes {share}, the dashed squares{why}."
    curves = None if study.curves is None else curve_picture(study.curves)
    return {"plan": maps, "plan_says": visible(says), "curves": curves}


def curve_picture(curves: Curves) -> dict[str, Any]:
    """The curves on a canvas of 600 × 260, with ticks; each with the band of its interval."""
    means = {name: curves.mean(name).mean(0) for name in curves.per_text}
    bands = {name: curves.interval(name) for name in curves.per_text}
    highest = max(float(np.nanmax(high)) for _, high in bands.values())
    lowest = min(float(np.nanmin(low)) for low, _ in bands.values())
    removed = [float(count) for count in curves.removed]
    ticks = round_ticks(lowest, highest)

    def place(count: float, loss: float) -> tuple[float, float]:
        up = 210.0 * (loss - ticks[0]) / (ticks[-1] - ticks[0])
        return round(60.0 + 520.0 * count / (removed[-1] or 1.0), 1), round(230.0 - up, 1)

    def points(counts: Sequence[float], losses: Sequence[float]) -> str:
        pairs = (place(*pair) for pair in zip(counts, losses, strict=True) if isfinite(pair[1]))
        return " ".join(f"{across},{up}" for across, up in pairs)

    lines = []
    for style, (name, mean) in enumerate(means.items()):
        low, high = bands[name]
        texts = [f"{m:.4g} [{a:.4g}, {b:.4g}]" for m, a, b in zip(mean, low, high, strict=True)]
        line = points(removed, mean.tolist())
        band = points(removed + removed[::-1], [*low.tolist(), *high[::-1].tolist()])
        drawn = {"points": line, "band": band, "style": min(style, 3)}
        lines.append({"name": visible(name), "texts": texts, **drawn})
    x_ticks = [x for x in round_ticks(0.0, removed[-1]) if x.is_integer() and x <= removed[-1]]
    return {
        "lines": lines,
        "x_ticks": [(place(x, ticks[0])[0], f"{x:,.0f}") for x in x_ticks],
        "y_ticks": [(place(0.0, y)[1], f"{y:.10g}") for y in ticks],
        "removed": [f"{count:.0f}" for count in removed],
        "loss": visible(curves.loss),
    }


def round_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers at equal distances; the first and the last enclose the range."""
    size = (high - low) or abs(high) or 1.0
    power = 10.0 ** floor(log10(size / 4))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= size / 4)
    # A limit that is a tick but for rounding needs no further one.
    first, last = floor(low / step + _ROUNDING), ceil(high / step - _ROUNDING)
    return [float(f"{number * step:.12g}") for number in range(first, max(last, first + 1) + 1)]
