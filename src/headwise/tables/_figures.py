"""How results show themselves: as text at a prompt, and as figures, which matplotlib draws."""

import base64
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from io import BytesIO
from itertools import chain, repeat
from pathlib import Path
from shutil import get_terminal_size
from string import ascii_uppercase
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Float64

from headwise._display import printable
from headwise._extras import require
from headwise.errors import ArgumentError, MissingPackageError
from headwise.files import as_path, write_beside
from headwise.tables._heads import Head
from headwise.tables._table_file import heads_of_rows

# The number of rows at a prompt. Longer tables show their first and last rows.
_ROWS = 12
# The color of a dot for each kind of effects, and the mark on a map.
_EFFECTS = {"none": ("0.6", ""), "not tested": ("0.6", "")}
_EFFECTS |= {"writer": ("#0b6e99", "^"), "canceller": ("#b4442a", "v")}


def in_columns(frame: pd.DataFrame, rows: int | None = None, width: int | None = None) -> str:
    """A frame as text, one line per row, with the column `name` first.

    Args:
        rows: The maximal number of rows; longer frames show their first and last rows. None
            shows all.
        width: The maximal length of a line; further columns follow below, with the names
            repeated. None does not wrap.
    """
    if frame.empty:
        return "none"
    named = frame.set_index("name").rename_axis(None)
    text = named.to_string(
        max_rows=rows, line_width=width, float_format="{:.3g}".format, na_rep="-"
    )
    return "\n".join(map(printable, text.split("\n")))


def at_prompt(title: str, frame: pd.DataFrame) -> str:
    """The `repr` of a table: a title, of several lines where there are notes, and a few rows."""
    lines = "\n".join(map(printable, title.split("\n")))
    return f"{lines}\n{in_columns(frame, _ROWS, get_terminal_size().columns)}"


# Okabe and Ito 2008: distinguishable with any color blindness. Rarer categories share gray.
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
OTHERS = "#777777"
PALEST = 0.25


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


def category_marks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A hue (`#rrggbb`) and a letter for each category, the most frequent first.

    The hues are distinguishable with any color blindness; categories after the seventh share gray,
    and those after the twenty-sixth a dot.
    """
    marks = zip(chain(HUES, repeat(OTHERS)), chain(ascii_uppercase, repeat("·")), strict=False)
    return dict(zip(names, marks, strict=False))


def category_styles(
    categories: Mapping[Head, tuple[str, float]],
) -> dict[str, tuple[int, str, str]]:
    """The number of heads, the letter and the hue of each category, the most frequent first."""
    counts = Counter(category for category, _ in categories.values()).most_common()
    marks = category_marks([name for name, _ in counts])
    return {name: (count, marks[name][1], marks[name][0]) for name, count in counts}


def opacity(strength: float) -> float:
    """The opacity of a hue: paler where a strength, 0 to 1, is smaller, and none at 0."""
    return PALEST + (1 - PALEST) * min(strength, 1.0) if strength > 0 else 0.0


FIGURE_ENDINGS = (".svg", ".png", ".pdf")
_CELL, _MARGINS, _SMALLEST = 0.28, (2.2, 1.2), 2.0  # inches
_TALLEST, _SLIMMEST = 6.0, 0.75  # of a map of colors: its height, and its width for that height
# From little to much: light to dark, as on paper and on the pages.
_PALETTE = ("#f0eee7", "#5798c0", "#0a3456")
_TICKS = 16  # about as many labels as fit along an axis
_NAMED = 40  # heads along the axis of a ranking: more names would overlap


def plot_axes(function: str, ax: Any, width: float, height: float) -> Any:
    """The given axes, or those of a new figure of this size, in inches.

    Raises:
        ArgumentError: `ax` is not matplotlib axes.
        MissingPackageError: matplotlib is not installed.
    """
    pyplot = require("matplotlib.pyplot", "plot", function)
    if ax is None:
        return pyplot.subplots(figsize=(width, height), layout="constrained")[1]
    if not isinstance(ax, require("matplotlib.axes", "plot", function).Axes):
        raise ArgumentError(
            f"{function}: ax is of the type {type(ax).__name__}. Give matplotlib axes, such as "
            f"plt.subplots()[1]."
        )
    return ax


def save_figure(ax: Any, path: str | Path) -> Path:
    """Write the figure that some axes belong to, and close it.

    The same figure is the same file, to the byte. Text in an .svg or .pdf stays text.

    Args:
        path: A path that ends in .svg, .png or .pdf.
    Raises:
        ArgumentError: the path has another ending.
        OutputError: the file cannot be written. No partial file is left behind.
    """
    matplotlib = require("matplotlib", "plot", "save_figure")
    pyplot = require("matplotlib.pyplot", "plot", "save_figure")
    path = as_path("save_figure", path)
    if path.suffix not in FIGURE_ENDINGS:
        raise ArgumentError(
            f"save_figure: {path} does not end in {', '.join(FIGURE_ENDINGS)}. Rename it."
        )
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    settings = {"svg.fonttype": "none", "svg.hashsalt": "headwise", "pdf.fonttype": 42}
    with matplotlib.rc_context(settings), write_beside(path) as beside:
        ax.figure.savefig(beside, format=path.suffix[1:], dpi=200, metadata=undated)
    pyplot.close(ax.figure)
    return path


def notebook_html(text: str, plot: Callable[[], Any]) -> str:
    """What a notebook shows of a result: its text, and its figure if matplotlib is installed.

    Args:
        plot: Draws the figure and returns its axes.
    """
    lines = "\n".join(escape(printable(line)) for line in text.splitlines())
    try:
        figure = plot().figure
    except MissingPackageError:
        return f"<pre>{lines}</pre>"
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    require("matplotlib.pyplot", "plot", "notebook_html").close(figure)  # not shown a second time
    source = base64.b64encode(drawn.getvalue()).decode("ascii")
    return f'<div><pre>{lines}</pre><img alt="" src="data:image/png;base64,{source}"/></div>'


def _grid_axes(function: str, grid: HeadGrid, ax: Any, *, squares: bool = True) -> Any:
    """The axes for this grid, with a label for each layer and head, as far as they fit.

    Args:
        squares: Whether a head needs a square, as for a letter; else many layers are lower.
    """
    width, height = (
        max(_SMALLEST, _CELL * cells + margin)
        for cells, margin in zip((grid.width, len(grid.layers)), _MARGINS, strict=True)
    )
    if not squares:
        height = min(height, _TALLEST)
        width = max(width, _SLIMMEST * height)
    ax = plot_axes(function, ax, width, height)
    ax.set_xlim(-0.5, grid.width - 0.5)
    ax.set_ylim(len(grid.layers) - 0.5, -0.5)
    ax.set_xticks(range(0, grid.width, -(-grid.width // _TICKS)))
    shown = range(0, len(grid.layers), -(-len(grid.layers) // (2 * _TICKS)))
    ax.set_yticks(shown, [printable(grid.names[row]) for row in shown], parse_math=False)
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    return ax


def plot_heads(
    function: str, heads: Sequence[Head], values: Float64[np.ndarray, " N"], label: str, ax: Any
) -> Any:
    """Draw a value of each head as a color; a head without a value is a cross.

    Values of both signs get colors that diverge from 0.

    Returns:
        The axes; their figure has a color bar with the label.
    """
    grid = HeadGrid(heads)
    ax = _grid_axes(function, grid, ax, squares=False)
    finite = values[np.isfinite(values)]
    colors: dict[str, Any] = {"cmap": _palette()}
    if len(finite) and finite.min() < 0 < finite.max():
        limit = float(np.abs(finite).max())
        colors = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    image = np.ma.masked_invalid(grid.image(values))
    drawn = ax.imshow(image, aspect="auto", interpolation="nearest", **colors)
    for head, value in zip(heads, values.tolist(), strict=True):
        if not np.isfinite(value):
            row, column = grid.place(head)
            ax.plot(column, row, "x", color="0.6", markersize=4)
    ax.figure.colorbar(drawn, ax=ax).set_label(printable(label), parse_math=False)
    return ax


def _palette() -> Any:
    colors = require("matplotlib.colors", "plot", "plot")
    return colors.LinearSegmentedColormap.from_list("headwise", _PALETTE)


def plot_removed(
    function: str, heads: Sequence[Head], removed: Collection[Head], title: str, ax: Any
) -> Any:
    """Draw the heads that stay as filled squares, and the removed ones as empty squares."""
    grid = HeadGrid(heads)
    ax = _grid_axes(function, grid, ax)
    for group, style in (("kept", {"color": "#0b6e99"}), ("removed", {"color": "0.6", "mfc": "w"})):
        places = [grid.place(head) for head in heads if (head in removed) == (group == "removed")]
        rows, columns = ([place[axis] for place in places] for axis in (0, 1))
        ax.plot(columns, rows, "s", markersize=9, label=group, **style)
    ax.set_title(printable(title), parse_math=False, fontsize="medium")
    plain_legend(ax)
    return ax


def plot_categories(
    function: str,
    heads: Sequence[Head],
    categories: Mapping[Head, tuple[str, float]],
    ax: Any,
    signs: Mapping[Head, tuple[str, str]] | None = None,
) -> Any:
    """Draw the category of each head as a hue and a letter, and its strength as lightness.

    Args:
        categories: The category of the heads that have one, and its strength from 0 (the letter
            alone, without a hue) to 1.
        signs: A further sign of some heads, and its meaning.
    """
    signs = signs or {}
    grid = HeadGrid(heads)
    ax = _grid_axes(function, grid, ax)
    styles = category_styles(categories)
    for head in heads:
        row, column = grid.place(head)
        category, strength = categories.get(head, ("", 0.0))
        sign, _ = signs.get(head, ("", ""))
        _, letter, hue = styles.get(category, (0, "", "#ffffff"))
        alpha = opacity(strength)
        square = {"markersize": 13, "markeredgecolor": "0.7", "markeredgewidth": 0.5}
        ax.plot(column, row, "s", markerfacecolor=(hue, alpha), **square)
        ax.text(column, row, sign + letter, ha="center", va="center_baseline", fontsize="small")
    for name, (count, letter, hue) in styles.items():
        text = printable(f"{letter}  {name}, {count}")
        ax.plot([], [], "s", color=hue, label=text)
    for (sign, meaning), count in Counter(signs.values()).most_common():
        text = printable(f"{sign}  {meaning}, {count}")
        ax.plot([], [], "s", color="#ffffff", markeredgecolor="0.7", label=text)
    if styles or signs:
        plain_legend(ax)
    return ax


def plot_ranking(
    function: str,
    heads: Sequence[Head],
    values: tuple[Float64[np.ndarray, " N"], ...],
    label: str,
    ax: Any,
) -> Any:
    """Draw the value of each head with its interval, in the order of the heads.

    Up to 40 heads are named along the axis.

    Args:
        values: The value of each head, and both ends of its interval.
    """
    ax = plot_axes(function, ax, 8.0, 3.5)
    ranks = np.arange(len(heads))
    value, low, high = values
    ax.vlines(ranks, low, high, color="0.6", linewidth=1)
    ax.plot(ranks, value, "o", color="#0b6e99", markersize=3)
    ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    ax.set_ylabel(printable(label), parse_math=False)
    if len(heads) <= _NAMED:
        ax.set_xticks(ranks, [str(head) for head in heads], rotation=90, fontsize="small")
    else:
        ax.set_xlabel("heads, from the least to the most important")
    return ax


def plot_effects(function: str, rows: pd.DataFrame, ax: Any) -> Any:
    """Draw the total against the direct effect of each head; those of a kind are named.

    Without total effects, draw a map of the direct ones; those of a kind are marked.
    """
    of_kinds = {kind: (rows["kind"] == kind).to_numpy() for kind in _EFFECTS}
    of_kinds = {kind: of_kind for kind, of_kind in of_kinds.items() if of_kind.any()}
    labels = {kind: f"{kind}, {of_kind.sum()}" for kind, of_kind in of_kinds.items()}
    if rows["total"].isna().all():
        heads = heads_of_rows(rows)
        ax = plot_heads(function, heads, rows["direct"].to_numpy(), "direct effect", ax)
        places = np.array([*map(HeadGrid(heads).place, heads)])
        for kind, of_kind in of_kinds.items():
            y, x = places[of_kind].T
            marks = {"marker": _EFFECTS[kind][1], "color": "k", "mfc": "w", "linestyle": ""}
            ax.plot(x, y, **marks, label=labels[kind])
        plain_legend(ax)
        return ax
    ax = plot_axes(function, ax, 4.6, 4.0)
    ends = rows[["direct", "total"]].to_numpy()
    ax.axline((0.0, 0.0), slope=1.0, color="0.8", linewidth=0.8, zorder=0)
    for kind, of_kind in of_kinds.items():
        color, marker = _EFFECTS[kind]
        ax.plot(*ends[of_kind].T, "o", color=color, markersize=4, label=labels[kind])
        for name, place in zip(rows["name"][of_kind], ends[of_kind], strict=True):
            if marker:
                ax.annotate(
                    printable(name), place, (3, 3), textcoords="offset points", fontsize="small"
                )
    ax.set_xlabel("direct effect: what the head writes")
    ax.set_ylabel("total effect: what is lost without it")
    plain_legend(ax)
    return ax


def plot_weights(
    function: str,
    weights: Float[np.ndarray, "T S"],
    title: str,
    ax: Any,
    tokens: Sequence[str] | None = None,
) -> Any:
    """Draw attention weights, 0 to 1: a row per query, a column per key, named by its token."""
    ax = plot_axes(function, ax, 4.6, 4.0)
    drawn = ax.imshow(weights, vmin=0, vmax=1, cmap=_palette(), interpolation="nearest")
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    if tokens is not None:
        names = [printable(token) for token in tokens]
        ax.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
        # The queries of a text that goes on over a cache are its last tokens.
        queries = names[len(names) - len(weights) :]
        ax.set_yticks(range(len(queries)), queries, parse_math=False)
    else:
        for ticks, size in zip((ax.set_yticks, ax.set_xticks), weights.shape, strict=True):
            ticks(range(0, size, -(-size // _TICKS)))
    ax.set_title(printable(title), parse_math=False, fontsize="medium")
    ax.figure.colorbar(drawn, ax=ax).set_label("weight")
    return ax


def plain_legend(ax: Any) -> None:
    """A legend beside the axes; its texts are names, never formulas."""
    legend = ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
