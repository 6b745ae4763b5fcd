"""Heads as coloured grids in HTML, for notebooks: no script, no style but its own."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain, repeat

import numpy as np
from jaxtyping import Float64

from headwise._display import printable
from headwise.tables._heads import Head
from headwise.tables.plots._categories import HUES, OTHERS, category_styles, opacity
from headwise.tables.plots._head_grid import HeadGrid
from headwise.tables.plots._plot_area import PlotArea

# Viridis at equal steps, dark to light: colour-blind safe, and readable in print.
_COLOURS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30",
            "#fde725")  # fmt: skip
_CELL = 10  # pixels
_CURVES = (300.0, 160.0)  # pixels
# Cells of all grids together; further grids are left out, and named.
_MOST_CELLS = 8000


def grid_html(
    title: str, heads: Sequence[Head], columns: Mapping[str, Float64[np.ndarray, " N"]]
) -> str:
    """A small grid for each column, a row per layer; a head's value shows when pointed at.

    Heads without a value are grey. Grids beyond 8,000 cells in all are left out, and named.
    """
    grid = HeadGrid(heads)
    cells = len(grid.layers) * grid.width
    shown = list(columns)[: max(1, _MOST_CELLS // cells)]
    left_out = ", ".join(name for name in columns if name not in shown)
    grids = "".join(_grid(name, grid, columns[name]) for name in shown)
    note = f"<p>Not shown: {_text(left_out)}.</p>" if left_out else ""
    return (
        f'<div style="font:12px sans-serif"><p>{_text(title)}</p>'
        f'<div style="display:flex;flex-wrap:wrap;gap:16px">{grids}</div>{note}</div>'
    )


def categories_html(
    title: str, heads: Sequence[Head], categories: Mapping[Head, tuple[str, float]]
) -> str:
    """A small grid with the category of each head as a hue and a letter, and a legend.

    Args:
        categories: As in `plot_categories`.
    """
    grid, styles = HeadGrid(heads), category_styles(categories)
    side = _CELL + 4
    squares = []
    for head in heads:
        row, column = grid.place(head)
        category, strength = categories.get(head, ("", 0.0))
        _, letter, hue = styles.get(category, (0, "", "#ffffff"))
        alpha = opacity(strength) if category else 1.0
        x, y = side * column, side * row
        squares.append(
            f'<rect x="{x}" y="{y}" width="{side - 1}" height="{side - 1}" fill="{hue}" '
            f'fill-opacity="{alpha:.2f}" stroke="#cccccc" stroke-width="0.5"><title>'
            f"{_text(str(head))}: {_text(category) or 'none'}</title></rect>"
            f'<text x="{x + side / 2 - 0.5}" y="{y + side - 4}" text-anchor="middle" '
            f'font-size="9">{letter}</text>'
        )
    legend = "".join(
        f"<li><b>{letter}</b> {_text(name)}, {count}</li>"
        for name, (count, letter, _) in styles.items()
    )
    return (
        f'<div style="font:12px sans-serif"><p>{_text(title)}</p>'
        f'<div style="display:flex;flex-wrap:wrap;gap:16px"><svg width="{side * grid.width}" '
        f'height="{side * len(grid.layers)}" role="img" aria-label="the category of every head, a '
        f'row per layer" style="background:#ffffff;color:#000000">{"".join(squares)}</svg>'
        f'<ul style="list-style:none;padding:0;margin:0">{legend}</ul></div></div>'
    )


def curves_html(
    title: str, x: Sequence[int], curves: Mapping[str, Float64[np.ndarray, " K"]]
) -> str:
    """A small picture of curves over `x`, and a legend with the value at the end of each."""
    finite = np.concatenate([values[np.isfinite(values)] for values in curves.values()])
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    width, height = _CURVES
    area = PlotArea(0.0, height, width, height, float(x[-1]), (float(low), float(high)))
    lines, legend = [], []
    for (name, values), hue in zip(curves.items(), chain(HUES, repeat(OTHERS)), strict=False):
        points = area.points([float(count) for count in x], values.tolist())
        lines.append(f'<polyline points="{points}" fill="none" stroke="{hue}" stroke-width="2"/>')
        legend.append(
            f'<li><span style="color:{hue}">—</span> {_text(name)}: {values[-1]:.3g}</li>'
        )
    return (
        f'<div style="font:12px sans-serif"><p>{_text(title)}</p>'
        f'<div style="display:flex;flex-wrap:wrap;gap:16px"><svg width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{_text(title)}" '
        f'style="background:#ffffff">{"".join(lines)}</svg>'
        f'<ul style="list-style:none;padding:0;margin:0">{"".join(legend)}</ul></div>'
        f"<p>{x[0]:g} to {x[-1]:g} along, {low:.3g} to {high:.3g} up</p></div>"
    )


def _grid(name: str, grid: HeadGrid, values: Float64[np.ndarray, " N"]) -> str:
    finite = values[np.isfinite(values)]
    ends = [finite.min(), finite.max()] if len(finite) else []
    span = " to ".join(dict.fromkeys(f"{end:.3g}" for end in ends)) or "no values"
    width, height = _CELL * grid.width, _CELL * len(grid.layers)
    cells = "".join(_cells(grid, values))
    return (
        f'<figure style="margin:0"><svg width="{width}" height="{height}" role="img" '
        f'aria-label="{_text(name)} of every head, a row per layer">{cells}</svg>'
        f"<figcaption>{_text(name)}<br/>{span}</figcaption></figure>"
    )


def _cells(grid: HeadGrid, values: Float64[np.ndarray, " N"]) -> Iterator[str]:
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    for head, value in zip(grid.heads, values.tolist(), strict=True):
        row, column = grid.place(head)
        share = (value - low) / (high - low) if high > low else 0.5
        known = np.isfinite(value)
        colour = _COLOURS[round(share * (len(_COLOURS) - 1))] if known else "#cccccc"
        yield (
            f'<rect x="{_CELL * column}" y="{_CELL * row}" width="{_CELL - 1}" '
            f'height="{_CELL - 1}" fill="{colour}"><title>{_text(str(head))}: {value:.4g}</title>'
            f"</rect>"
        )


def _text(text: str) -> str:
    return escape(printable(text))
