"""Figures of results: heads as a grid, scores by rank, curves; matplotlib draws them."""

from headwise.tables.plots._axes import save_figure
from headwise.tables.plots._categories import category_marks, plot_categories
from headwise.tables.plots._curve_lines import CurveLine, plot_curves
from headwise.tables.plots._head_grid import HeadGrid, plot_heads, plot_removed
from headwise.tables.plots._html import categories_html, curves_html, grid_html
from headwise.tables.plots._plot_area import PlotArea
from headwise.tables.plots._ranking import plot_ranking
from headwise.tables.plots._weights import plot_weights

__all__ = [
    "CurveLine",
    "HeadGrid",
    "PlotArea",
    "categories_html",
    "category_marks",
    "curves_html",
    "grid_html",
    "plot_categories",
    "plot_curves",
    "plot_heads",
    "plot_ranking",
    "plot_removed",
    "plot_weights",
    "save_figure",
]
