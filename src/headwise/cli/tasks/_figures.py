"""Figures of several panels."""

from math import ceil
from pathlib import Path

import numpy as np

from headwise._packages import require
from headwise.tables import HeadTable, save_figure

_COLUMNS, _PANEL = 3, (4.2, 3.0)  # inches


def draw_statistics(table: HeadTable, path: Path) -> Path:
    """Write a figure with a map of each statistic that applies."""
    names = [name for name in table.statistics if np.isfinite(table.mean(name)).any()]
    columns = min(_COLUMNS, len(names))
    rows = ceil(len(names) / columns)
    pyplot = require("matplotlib.pyplot", "plot", "--figure")
    size = _PANEL[0] * columns, _PANEL[1] * rows
    _, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for name, ax in zip(names, axes.flat, strict=False):
        table.plot(name, ax=ax)
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    return save_figure(axes.flat[0], path)
