"""The matplotlib axes that a figure is drawn on, and the file it is saved to."""

from pathlib import Path
from typing import Any

from headwise._packages import require
from headwise.errors import ArgumentError
from headwise.files import as_path, write_beside

FIGURE_ENDINGS = (".svg", ".png", ".pdf")


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
