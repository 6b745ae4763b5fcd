"""Maps of heads for the page: squares in a few steps of colour, a row per layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from headwise.tables import Head, HeadGrid

STEPS = 8
_SIDES = 4  # steps of each sign
CELL, MARGIN = 12, 26
_TICKS = 12


@dataclass(frozen=True)
class DifferenceSquare:
    """A head on a map: its place, its class of colour, and its description."""

    x: int
    y: int
    style: str
    title: str


@dataclass(frozen=True)
class DifferenceMap:
    """A map as the page draws it: its title, squares and labels, in units of the picture."""

    title: str
    caption: str
    squares: Sequence[DifferenceSquare]
    rows: Sequence[tuple[int, str]]
    columns: Sequence[tuple[int, str]]
    width: int
    height: int


def head_map(
    title: str,
    heads: Sequence[Head],
    values: Float64[np.ndarray, " N"],
    *,
    limits: tuple[float, float],
    signed: bool = False,
) -> DifferenceMap:
    """The map of a value of each head; a head without a value is hollow.

    Args:
        limits: The values of the palest and the darkest step.
        signed: Whether colours diverge from 0.
    """
    grid = HeadGrid(heads)
    squares = []
    for head, value in zip(heads, values.tolist(), strict=True):
        row, column = grid.place(head)
        style = _signed_step(value, limits[1]) if signed else _step(value, limits)
        shown = number(value, signed) if np.isfinite(value) else "not there"
        squares.append(
            DifferenceSquare(MARGIN + CELL * column, CELL * row, style, f"{head}: {shown}")
        )
    n_rows = len(grid.layers)
    rows = range(0, n_rows, -(-n_rows // (2 * _TICKS)))
    columns = range(0, grid.width, -(-grid.width // _TICKS))
    low, high = (number(limit, signed) for limit in limits)
    return DifferenceMap(
        title,
        f"{low} to {high}",
        squares,
        [(CELL * row, grid.names[row]) for row in rows],
        [(MARGIN + CELL * column, str(column)) for column in columns],
        MARGIN + CELL * grid.width,
        CELL * n_rows + 14,
    )


def number(value: float, signed: bool = False) -> str:
    """Three significant digits, with a true minus sign."""
    return f"{value + 0.0:{'+' if signed and value else ''}.3g}".replace("-", "\N{MINUS SIGN}")


def _step(value: float, limits: tuple[float, float]) -> str:
    if not np.isfinite(value):
        return "absent"
    low, high = limits
    share = (value - low) / (high - low) if high > low else 0.0
    return f"s{min(STEPS, max(0, round(share * STEPS)))}"


def _signed_step(value: float, limit: float) -> str:
    if not np.isfinite(value):
        return "absent"
    step = min(_SIDES, round(abs(value) / limit * _SIDES)) if limit > 0 else 0
    return f"{'p' if value > 0 else 'n'}{step}" if step else "zero"
