"""Pictures of results: figures by matplotlib, and SVG for notebooks and pages."""

from headwise.tables.plots._figures import (
    plain_legend,
    plot_axes,
    plot_categories,
    plot_heads,
    plot_ranking,
    plot_removed,
    plot_weights,
    save_figure,
)
from headwise.tables.plots._grid import category_marks
from headwise.tables.plots._svg import (
    Frame,
    Square,
    categories_html,
    curves_html,
    draw_grid,
    grid_html,
    placing,
    points,
)

__all__ = [
    "Frame",
    "Square",
    "categories_html",
    "category_marks",
    "curves_html",
    "draw_grid",
    "grid_html",
    "placing",
    "plain_legend",
    "plot_axes",
    "plot_categories",
    "plot_heads",
    "plot_ranking",
    "plot_removed",
    "plot_weights",
    "points",
    "save_figure",
]
