"""Heads as grids of squares, and curves, in SVG: no script, and no style but the one given.

Matplotlib's SVG cannot stand in a page whose policy allows no inline style, nor where matplotlib is
not installed, as in a notebook without the extra `plot`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import chain, repeat
from math import isfinite
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from headwise._display import printable
from headwise.tables._grid import HUES, OTHERS, HeadGrid, category_styles, opacity
from headwise.tables._heads import Head

# Viridis at equal steps, dark to light: color-blind safe, and readable in print.
_COLORS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30",
            "#fde725")  # fmt: skip
_CELL = 10  # pixels
_CURVES = (300.0, 160.0)  # pixels
# Cells of all grids together; further grids are left out, and named.
_MOST_CELLS = 8000


class Square(NamedTuple):
    """The square of one head: its attributes, what it says when pointed at, and a letter."""

    attributes: Mapping[str, str]
    title: str = ""
    letter: str = ""
    ink: str = ""  # the class of the letter


class Frame(NamedTuple):
    """Where the squares of a grid and the names of its rows and columns lie, in pixels."""

    step: int  # from one square to the next
    side: int  # of a square
    left: int = 0  # of the squares, where the names of layers stand
    top: int = 0
    bottom: int = 0
    every: tuple[int, int] = (0, 0)  # which rows and columns are named; 0: none
    row_end: int = 0  # where the names of rows end
    column_at: int = 0  # the height of the names of columns; below 0: from the lower edge


def draw_grid(
    heads: Sequence[Head],
    squares: Iterable[Square],
    label: str,
    frame: Frame,
    inside: str = "",
    **attributes: object,
) -> str:
    """Draw heads as squares, a row for each layer and a column for each head of it.

    Args:
        squares: One for each head.
        label: What the picture shows, for readers that cannot see it.
        inside: Further elements of the picture.
        attributes: Those of the picture.
    """
    grid = HeadGrid(heads)
    width = frame.left + frame.step * grid.width
    height = frame.top + frame.step * len(grid.layers) + frame.bottom
    half = frame.side // 2
    parts = [inside]
    every_row, every_column = frame.every
    for row in range(0, len(grid.layers), every_row) if every_row else ():
        y = frame.top + frame.step * row + half
        names = {"x": frame.row_end, "y": y, "text-anchor": "end", "dominant-baseline": "central"}
        parts.append(_element("text", {"class": "axis", **names}, escape(grid.names[row])))
    for column in range(0, grid.width, every_column) if every_column else ():
        x, y = frame.left + frame.step * column + half, frame.column_at % height
        names = {"x": x, "y": y, "text-anchor": "middle"}
        parts.append(_element("text", {"class": "axis", **names}, str(column)))
    for head, square in zip(heads, squares, strict=True):
        row, column = grid.place(head)
        x, y = frame.left + frame.step * column, frame.top + frame.step * row
        title = _element("title", {}, text(square.title)) if square.title else ""
        place = {"x": x, "y": y, "width": frame.side, "height": frame.side}
        parts.append(_element("rect", {**square.attributes, **place}, title))
        if square.letter:
            middle = {"x": x + half, "y": y + half, "text-anchor": "middle"}
            ink = {"class": square.ink, "dominant-baseline": "central", **middle}
            parts.append(_element("text", ink, text(square.letter)))
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return _element(
        "svg", {**size, "role": "img", "aria-label": label, **attributes}, "\n".join(parts)
    )


def grid_html(
    title: str, heads: Sequence[Head], columns: Mapping[str, Float64[np.ndarray, " N"]]
) -> str:
    """A small grid for each column, a row per layer; a head's value shows when pointed at.

    Heads without a value are gray. Grids beyond 8,000 cells in all are left out, and named.
    """
    grid = HeadGrid(heads)
    cells = len(grid.layers) * grid.width
    shown = list(columns)[: max(1, _MOST_CELLS // cells)]
    left_out = ", ".join(name for name in columns if name not in shown)
    grids = "".join(_value_grid(name, heads, columns[name]) for name in shown)
    note = f"<p>Not shown: {text(left_out)}.</p>" if left_out else ""
    return _view(title, grids, note)


def _value_grid(name: str, heads: Sequence[Head], values: Float64[np.ndarray, " N"]) -> str:
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    shares = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    span = " to ".join(dict.fromkeys(f"{end:.3g}" for end in (low, high) if len(finite)))
    squares = (
        Square(
            {"fill": _COLORS[round(share * (len(_COLORS) - 1))] if isfinite(value) else "#cccccc"},
            f"{head}: {value:.4g}",
        )
        for head, value, share in zip(heads, values.tolist(), shares.tolist(), strict=True)
    )
    label = f"{printable(name)} of every head, a row per layer"
    picture = draw_grid(heads, squares, label, Frame(_CELL, _CELL - 1))
    caption = f"<figcaption>{text(name)}<br/>{span or 'no values'}</figcaption>"
    return f'<figure style="margin:0">{picture}{caption}</figure>'


def categories_html(
    title: str, heads: Sequence[Head], categories: Mapping[Head, tuple[str, float]]
) -> str:
    """A small grid with the category of each head as a hue and a letter, and a legend.

    Args:
        categories: As in `plot_categories`.
    """
    styles = category_styles(categories)
    squares = []
    for head in heads:
        category, strength = categories.get(head, ("", 0.0))
        _, letter, hue = styles.get(category, (0, "", "#ffffff"))
        alpha = opacity(strength) if category else 1.0
        fill = {"fill": hue, "fill-opacity": f"{alpha:.2f}"}
        line = {"stroke": "#cccccc", "stroke-width": "0.5"}
        squares.append(Square(fill | line, f"{head}: {category or 'none'}", letter))
    picture = draw_grid(
        heads, squares, "the category of every head, a row per layer", Frame(_CELL + 4, _CELL + 3),
        style="background:#ffffff;color:#000000;font-size:9px",
    )  # fmt: skip
    legend = [f"<b>{letter}</b> {text(n)}, {count}" for n, (count, letter, _) in styles.items()]
    return _view(title, picture + _legend(legend))


def curves_html(
    title: str, x: Sequence[int], curves: Mapping[str, Float64[np.ndarray, " K"]]
) -> str:
    """A small picture of curves over `x`, and a legend with the value at the end of each."""
    finite = np.concatenate([values[np.isfinite(values)] for values in curves.values()])
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    width, height = _CURVES
    place = placing(0.0, height, width, height, float(x[-1]), (low, high))
    lines, legend = [], []
    for (name, values), hue in zip(curves.items(), chain(HUES, repeat(OTHERS)), strict=False):
        line = {"points": points(place, [float(n) for n in x], values.tolist()), "stroke": hue}
        lines.append(_element("polyline", {**line, "fill": "none", "stroke-width": "2"}))
        legend.append(f'<span style="color:{hue}">—</span> {text(name)}: {values[-1]:.3g}')
    size = {"width": f"{width:g}", "height": f"{height:g}", "style": "background:#ffffff"}
    label = {"role": "img", "aria-label": printable(title)}
    picture = _element("svg", {**size, **label}, "".join(lines))
    ends = f"<p>{x[0]:g} to {x[-1]:g} along, {low:.3g} to {high:.3g} up</p>"
    return _view(title, picture + _legend(legend), ends)


def placing(
    left: float,
    bottom: float,
    width: float,
    height: float,
    largest_x: float,
    y_range: tuple[float, float],
) -> Callable[[float, float], tuple[float, float]]:
    """Where a pair of values lies in a rectangle whose x axis begins at 0, to a tenth of a pixel.

    Args:
        bottom: The lower edge, from the top of the picture.
        largest_x: The value at the right edge; 0 stands for 1.
        y_range: The values at the lower and the upper edge; equal ones lie at the lower edge.
    """
    low, high = y_range

    def place(x: float, y: float) -> tuple[float, float]:
        up = height * (y - low) / ((high - low) or 1)
        return round(left + width * x / (largest_x or 1.0), 1), round(bottom - up, 1)

    return place


def points(
    place: Callable[[float, float], tuple[float, float]], x: Sequence[float], y: Sequence[float]
) -> str:
    """The points of a line as SVG has them, without those that are not finite."""
    pairs = (place(*pair) for pair in zip(x, y, strict=True) if isfinite(pair[1]))
    return " ".join(f"{across},{up}" for across, up in pairs)


def text(content: str) -> str:
    """Text from models and corpora: printable, and never markup."""
    return escape(printable(content))


def _element(tag: str, attributes: Mapping[str, object], inside: str = "") -> str:
    """An element; an attribute without a value is left out."""
    pairs = [f'{name}="{escape(str(x))}"' for name, x in attributes.items() if x != ""]
    return f"<{' '.join([tag, *pairs])}>{inside}</{tag}>"


def _view(title: str, content: str, note: str = "") -> str:
    row = f'<div style="display:flex;flex-wrap:wrap;gap:16px">{content}</div>'
    return f'<div style="font:12px sans-serif"><p>{text(title)}</p>{row}{note}</div>'


def _legend(entries: Iterable[str]) -> str:
    items = "".join(f"<li>{entry}</li>" for entry in entries)
    return f'<ul style="list-style:none;padding:0;margin:0">{items}</ul>'
