"""Pictures that need no script: maps of the heads, and curves, as shapes of an SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10

import numpy as np

from headwise._display import counted
from headwise.report._study_data import StudyData
from headwise.report.page._visible_text import visible
from headwise.tables import Curves, Head, PlotArea

# The side of a cell and the gap beside it, by the number of heads in a layer.
_SIDES = ((16, 30, 4), (32, 22, 3), (10**6, 14, 2))
_LABELS = 46  # left of the cells and above them
_PALEST = 0.25
_DARK = 0.18  # of relative luminance: below it white contrasts more than black
_KEPT = "#5b8db8"
_WHITE = (255, 255, 255)
_ROUNDING = 1e-3  # of the distance of two ticks, less than a pixel


@dataclass(frozen=True)
class HeadCell:
    """What a map says about a head: color, letter, a phrase, and whether nothing was tested."""

    color: str
    letter: str
    text: str
    untested: bool = False


@dataclass(frozen=True)
class Square:
    """A cell at its place; `ink` is "dark" or "light", for the letter."""

    index: int
    name: str
    x: int
    y: int
    cell: HeadCell
    ink: str


@dataclass(frozen=True)
class HeadMap:
    """The heads of one stack as squares, a row for each layer."""

    stack: str
    width: int
    height: int
    side: int
    squares: list[Square] = field(default_factory=list)
    rows: list[tuple[int, str]] = field(default_factory=list)
    columns: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class DrawnCurve:
    """A curve: the points of its polyline and of the band of its interval."""

    name: str
    points: str
    band: str
    style: int
    values: list[str]


@dataclass(frozen=True)
class CurvePicture:
    """Curves of the loss over the number of removed heads."""

    lines: list[DrawnCurve]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    removed: list[str]
    loss: str


def head_maps(heads: Sequence[Head], cells: Mapping[str, HeadCell]) -> list[HeadMap]:
    """A map for each stack; a head without a cell is blank."""
    return [_head_map(stack, heads, cells) for stack in dict.fromkeys(h.stack for h in heads)]


def _head_map(stack: str, heads: Sequence[Head], cells: Mapping[str, HeadCell]) -> HeadMap:
    members = [(index, head) for index, head in enumerate(heads) if head.stack == stack]
    layers = sorted({head.layer for _, head in members})
    width = max(head.head for _, head in members) + 1
    side, gap = next((side, gap) for most, side, gap in _SIDES if width <= most)
    step = side + gap
    blank = HeadCell("", "", "")
    squares = []
    for index, head in members:
        cell = cells.get(str(head), blank)
        x, y = _LABELS + head.head * step, _LABELS + layers.index(head.layer) * step
        ink = "light" if cell.color and _luminance(cell.color) < _DARK else "dark"
        squares.append(Square(index, str(head), x, y, cell, ink))
    every = 1 if side > 14 else 4  # smaller cells have no room for each number
    return HeadMap(
        stack=stack,
        width=_LABELS + width * step,
        height=_LABELS + len(layers) * step,
        side=side,
        squares=squares,
        rows=[
            (_LABELS + row * step + side // 2, str(layer))
            for row, layer in enumerate(layers)
            if row % every == 0
        ],
        columns=[
            (_LABELS + column * step + side // 2, str(column)) for column in range(0, width, every)
        ],
    )


def tint(color: str, strength: float) -> str:
    """The color mixed with white: paler where the strength, 0 … 1, is smaller."""
    share = _PALEST + (1 - _PALEST) * min(max(strength, 0.0), 1.0)
    mixed = (
        round(white + (part - white) * share)
        for part, white in zip(_channels(color), _WHITE, strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _channels(color: str) -> list[int]:
    return [int(color[start : start + 2], 16) for start in (1, 3, 5)]


def _luminance(color: str) -> float:
    red, green, blue = ((part / 255) ** 2.2 for part in _channels(color))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@dataclass(frozen=True)
class Pruning:
    """The plan as a map with holes, and the curves; each None if the study does not hold it."""

    plan: list[HeadMap] | None
    plan_says: str
    curves: CurvePicture | None


def pruning(study: StudyData) -> Pruning | None:
    """The section about removing heads; None if the study holds neither plan nor curves."""
    if study.plan is None and study.curves is None:
        return None
    maps, says = None, ""
    if study.plan is not None:
        gone = set(study.plan.removed)
        kept = {
            str(head): HeadCell("", "", "removed", untested=True)
            if head in gone
            else HeadCell(_KEPT, "", "kept")
            for head in study.table.heads
        }
        maps = head_maps(study.table.heads, kept)
        share = f"{len(gone):,} of {counted(len(study.table.heads), 'head')}"
        why = f" ({study.plan.why})" if study.plan.why else ""
        says = f"The plan removes {share}, the dashed squares{why}."
    curves = None if study.curves is None else curve_picture(study.curves)
    return Pruning(maps, visible(says.strip()), curves)


def curve_picture(curves: Curves) -> CurvePicture:
    """The curves on a canvas of 600 × 260, with ticks."""
    means = {name: curves.mean(name).mean(0) for name in curves.per_text}
    bands = {name: curves.interval(name) for name in curves.per_text}
    highest = max(float(np.nanmax(high)) for _, high in bands.values())
    lowest = min(float(np.nanmin(low)) for low, _ in bands.values())
    removed = [float(count) for count in curves.removed]
    ticks = round_ticks(lowest, highest)
    area = PlotArea(60.0, 230.0, 520.0, 210.0, removed[-1], (ticks[0], ticks[-1]))
    lines = []
    for style, (name, mean) in enumerate(means.items()):
        low, high = bands[name]
        values = [f"{m:.4g} [{a:.4g}, {b:.4g}]" for m, a, b in zip(mean, low, high, strict=True)]
        line = area.points(removed, mean.tolist())
        band = area.points(removed + removed[::-1], [*low.tolist(), *high[::-1].tolist()])
        lines.append(DrawnCurve(visible(name), line, band, min(style, 3), values))
    return CurvePicture(
        lines=lines,
        x_ticks=[
            (area.place(x, ticks[0])[0], f"{x:,.0f}")
            for x in round_ticks(0.0, removed[-1])
            if x.is_integer() and x <= removed[-1]
        ],
        y_ticks=[(area.place(0.0, y)[1], f"{y:.10g}") for y in ticks],
        removed=[f"{count:.0f}" for count in removed],
        loss=visible(curves.loss),
    )


def round_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers at equal distances; the first and the last enclose the range."""
    size = (high - low) or abs(high) or 1.0
    power = 10.0 ** floor(log10(size / 4))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= size / 4)
    # A limit that is a tick but for rounding needs no further one.
    first, last = floor(low / step + _ROUNDING), ceil(high / step - _ROUNDING)
    return [float(f"{number * step:.12g}") for number in range(first, max(last, first + 1) + 1)]
