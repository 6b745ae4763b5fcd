"""Lines of a loss against the number of removed heads, with the elbow of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from jaxtyping import Float64, Int64
from numpy import ndarray

from headwise._display import printable
from headwise.tables.plots._axes import plot_axes

# Distinguishable with red-green blindness, and in print.
_COLORS = ("#0b6e99", "#d9730d", "#6940a5", "#448361", "#ad1a72", "#64473a")
_BAND = "#8a8a8a"


@dataclass(frozen=True, eq=False)
class CurveLine:
    """One line of a figure.

    Attributes:
        name: The name of the order.
        label: Its text in the legend.
        removed: The numbers of removed heads.
        mean: The mean loss at each.
        band: The least and the largest loss of any order, if the line stands for several.
        elbow: The number of removable heads, and both ends of its interval.
        dashed: Whether the line extends the figure of other curves.
    """

    name: str
    label: str
    removed: Int64[ndarray, " K"]
    mean: Float64[ndarray, " K"]
    band: tuple[Float64[ndarray, " K"], Float64[ndarray, " K"]] | None = None
    elbow: tuple[int, float, float] | None = None
    dashed: bool = False


def plot_curves(
    function: str,
    lines: Sequence[CurveLine],
    labels: tuple[str, str],
    ax: Any,
    *,
    bar: tuple[float, str] | None = None,
) -> Any:
    """Draw lines; several orders become a band, an elbow a dot with its interval.

    If the name of a dashed line extends the name of another, such as `half-gate, recovered`, it
    has the same colour.

    Args:
        labels: Those of the two axes.
        bar: A loss that is drawn as a dotted line, and its label.
    """
    ax = plot_axes(function, ax, 8.0, 4.2)
    for line, color in _coloured(lines):
        if line.band is not None:
            ax.fill_between(line.removed, *line.band, color=color, alpha=0.25, linewidth=0)
        if line.elbow is not None:
            _plot_elbow(ax, line, color)
        style = "--" if line.dashed else "-"
        ax.plot(line.removed, line.mean, style, color=color, label=printable(line.label))
    if bar is not None:
        ax.axhline(bar[0], color="#333333", linestyle=":", label=bar[1])
    ax.set_xlabel(labels[0])
    ax.set_ylabel(printable(labels[1]), parse_math=False)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlim(left=0)
    legend = ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return ax


def _plot_elbow(ax: Any, line: CurveLine, color: str) -> None:
    assert line.elbow is not None
    heads, low, high = line.elbow
    height = float(line.mean[line.removed == heads][0])
    if low == low:  # NaN for a single text
        ax.plot([low, high], [height, height], "|-", color=color, linewidth=1)
    ax.plot(heads, height, "o", color=color)


def _coloured(lines: Sequence[CurveLine]) -> Iterator[tuple[CurveLine, str]]:
    colors: dict[str, str] = {}
    unused = cycle(_COLORS)
    for line in lines:
        extended = [x for x in colors if line.dashed and line.name.startswith(f"{x}, ")]
        color = colors.get(max(extended, key=len, default=""))
        color = color or (next(unused) if line.band is None else _BAND)
        if not line.dashed:
            colors[line.name] = color
        yield line, color
