"""Heads as a coloured grid in HTML, for notebooks: no script, no style but its own."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np
from jaxtyping import Float64

from headwise._display import printable
from headwise.tables._heads import Head
from headwise.tables.plots._head_grid import HeadGrid

# Viridis at equal steps, dark to light: colour-blind safe, and readable in print.
_COLOURS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30",
            "#fde725")  # fmt: skip
_CELL = 10  # pixels
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


def _grid(name: str, grid: HeadGrid, values: Float64[np.ndarray, " N"]) -> str:
    finite = values[np.isfinite(values)]
    span = f"{finite.min():.3g} to {finite.max():.3g}" if len(finite) else "no values"
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
