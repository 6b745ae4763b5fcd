"""Figures of several panels."""

from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from headwise._packages import require
from headwise.report import Comparison
from headwise.tables import HeadTable, save_figure

_COLUMNS, _PANEL = 3, (4.2, 3.0)  # inches


def draw_statistics(table: HeadTable, path: Path) -> Path:
    """Write a figure with a map of each statistic that applies."""
    names = [name for name in table.statistics if np.isfinite(table.mean(name)).any()]
    return _draw_panels(names, table.plot, path)


def draw_differences(comparison: Comparison, path: Path) -> Path:
    """Write a figure with a map of the difference of each statistic that applies."""
    names = [
        name
        for name in comparison.statistics
        if np.isfinite(comparison.values("difference", name)).any()
    ]
    return _draw_panels(names, comparison.plot, path)


def _draw_panels(names: Sequence[str], plot: Callable[..., Any], path: Path) -> Path:
    """Write a figure with a panel for each name."""
    columns = min(_COLUMNS, len(names))
    rows = ceil(len(names) / columns)
    pyplot = require("matplotlib.pyplot", "plot", "--figure")
    size = _PANEL[0] * columns, _PANEL[1] * rows
    _, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for name, ax in zip(names, axes.flat, strict=False):
        plot(name, ax=ax)
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    return save_figure(axes.flat[0], path)
