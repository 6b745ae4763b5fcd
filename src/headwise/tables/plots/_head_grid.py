"""Heads as a grid: a row for each layer, a column for each head."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64

from headwise._display import printable
from headwise.tables._heads import Head
from headwise.tables.plots._axes import plot_axes

_CELL, _MARGINS, _SMALLEST = 0.28, (2.2, 1.2), 2.0  # inches
_TICKS = 16  # about as many labels as fit along an axis


@dataclass(frozen=True)
class HeadGrid:
    """The place of each head in a grid of layers and heads."""

    heads: Sequence[Head]

    @cached_property
    def layers(self) -> list[tuple[str, int]]:
        """The stack and the layer of each row, in the order of the heads."""
        return list(dict.fromkeys((head.stack, head.layer) for head in self.heads))

    @cached_property
    def width(self) -> int:
        return 1 + max(head.head for head in self.heads)

    @cached_property
    def names(self) -> list[str]:
        """The name of each row: the layer, and the stack if there are several."""
        several = len({stack for stack, _ in self.layers}) > 1
        return [f"{stack} {layer}" if several else str(layer) for stack, layer in self.layers]

    def place(self, head: Head) -> tuple[int, int]:
        """The row and the column of a head."""
        return self.layers.index((head.stack, head.layer)), head.head

    def image(self, values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, "layers width"]:
        """The values of all heads as a grid; NaN where there is no head."""
        grid = np.full((len(self.layers), self.width), np.nan)
        rows, columns = zip(*map(self.place, self.heads), strict=True)
        grid[list(rows), list(columns)] = values
        return grid

    def axes(self, function: str, ax: Any) -> Any:
        """The axes for this grid, with a label for each layer and head, as far as they fit."""
        width, height = (
            max(_SMALLEST, _CELL * cells + margin)
            for cells, margin in zip((self.width, len(self.layers)), _MARGINS, strict=True)
        )
        ax = plot_axes(function, ax, width, height)
        ax.set_xlim(-0.5, self.width - 0.5)
        ax.set_ylim(len(self.layers) - 0.5, -0.5)
        ax.set_xticks(range(0, self.width, -(-self.width // _TICKS)))
        shown = range(0, len(self.layers), -(-len(self.layers) // (2 * _TICKS)))
        ax.set_yticks(shown, [printable(self.names[row]) for row in shown], parse_math=False)
        ax.set_xlabel("head")
        ax.set_ylabel("layer")
        return ax


def plot_heads(
    function: str, heads: Sequence[Head], values: Float64[np.ndarray, " N"], label: str, ax: Any
) -> Any:
    """Draw a value of each head as a colour; a head without a value is a cross.

    Values of both signs get colours that diverge from 0.

    Returns:
        The axes; their figure has a colour bar with the label.
    """
    grid = HeadGrid(heads)
    ax = grid.axes(function, ax)
    finite = values[np.isfinite(values)]
    colours: dict[str, Any] = {"cmap": "viridis"}
    if len(finite) and finite.min() < 0 < finite.max():
        limit = float(np.abs(finite).max())
        colours = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    image = np.ma.masked_invalid(grid.image(values))
    drawn = ax.imshow(image, aspect="auto", interpolation="nearest", **colours)
    for head, value in zip(heads, values.tolist(), strict=True):
        if not np.isfinite(value):
            row, column = grid.place(head)
            ax.plot(column, row, "x", color="0.6", markersize=4)
    ax.figure.colorbar(drawn, ax=ax).set_label(printable(label), parse_math=False)
    return ax


def plot_removed(
    function: str, heads: Sequence[Head], removed: Collection[Head], title: str, ax: Any
) -> Any:
    """Draw the heads that stay as filled squares, and the removed ones as empty squares."""
    grid = HeadGrid(heads)
    ax = grid.axes(function, ax)
    for group, style in (("kept", {"color": "#0b6e99"}), ("removed", {"color": "0.6", "mfc": "w"})):
        places = [grid.place(head) for head in heads if (head in removed) == (group == "removed")]
        rows, columns = ([place[axis] for place in places] for axis in (0, 1))
        ax.plot(columns, rows, "s", markersize=9, label=group, **style)
    ax.set_title(printable(title), parse_math=False, fontsize="medium")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax
