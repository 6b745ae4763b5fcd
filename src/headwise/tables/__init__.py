"""Results of this library: one row per head, plain arrays, and the files that hold them."""

from headwise.tables._bootstrap import (
    DRAWS,
    bootstrap_means,
    interval_of,
    rate,
    ratio_interval,
    resample_counts,
)
from headwise.tables._columns import address_columns, at_prompt, in_columns
from headwise.tables._curves import Curves, Elbow
from headwise.tables._figures import (
    plot_categories,
    plot_heads,
    plot_removed,
    plot_weights,
    save_figure,
)
from headwise.tables._grid import category_marks
from headwise.tables._head_table import HeadTable
from headwise.tables._heads import Head, HeadLike, HeadsLike, is_head, list_heads, resolve_heads
from headwise.tables._scores import Scores, random_orders, removable
from headwise.tables._statistics import STATISTICS, statistic_label
from headwise.tables._svg import (
    Frame,
    Square,
    categories_html,
    draw_grid,
    grid_html,
    placing,
    points,
)
from headwise.tables._table_file import TableFile, numbers_of, texts_of
from headwise.tables._totals import COLUMNS, TextSums, Totals

__all__ = [
    "COLUMNS",
    "DRAWS",
    "STATISTICS",
    "Curves",
    "Elbow",
    "Frame",
    "Head",
    "HeadLike",
    "HeadTable",
    "HeadsLike",
    "Scores",
    "Square",
    "TableFile",
    "TextSums",
    "Totals",
    "address_columns",
    "at_prompt",
    "bootstrap_means",
    "categories_html",
    "category_marks",
    "draw_grid",
    "grid_html",
    "in_columns",
    "interval_of",
    "is_head",
    "list_heads",
    "numbers_of",
    "placing",
    "plot_categories",
    "plot_heads",
    "plot_removed",
    "plot_weights",
    "points",
    "random_orders",
    "rate",
    "ratio_interval",
    "removable",
    "resample_counts",
    "resolve_heads",
    "save_figure",
    "statistic_label",
    "texts_of",
]
