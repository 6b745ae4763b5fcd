"""Results of this library: one row per head, plain arrays, and the files that hold them."""

from headwise.tables._bootstrap import (
    DRAWS,
    bootstrap_means,
    ratio_interval,
    resample_counts,
    studentized_interval,
    tails_of,
)
from headwise.tables._columns import at_prompt, in_columns
from headwise.tables._head_table import HeadTable
from headwise.tables._heads import Head, HeadLike, HeadsLike, resolve_heads
from headwise.tables._scores import Scores, random_orders, removable
from headwise.tables._statistics import STATISTICS
from headwise.tables._totals import COLUMNS, TextSums, Totals
from headwise.tables.curves import Curves, Elbow
from headwise.tables.file import (
    numbers_of,
    read_saved,
    texts_of,
    write_table_file,
)
from headwise.tables.plots import (
    HeadGrid,
    PlotArea,
    categories_html,
    category_marks,
    grid_html,
    plot_categories,
    plot_heads,
    plot_removed,
    plot_weights,
    save_figure,
)

__all__ = [
    "COLUMNS",
    "DRAWS",
    "STATISTICS",
    "Curves",
    "Elbow",
    "Head",
    "HeadGrid",
    "HeadLike",
    "HeadTable",
    "HeadsLike",
    "PlotArea",
    "Scores",
    "TextSums",
    "Totals",
    "at_prompt",
    "bootstrap_means",
    "categories_html",
    "category_marks",
    "grid_html",
    "in_columns",
    "numbers_of",
    "plot_categories",
    "plot_heads",
    "plot_removed",
    "plot_weights",
    "random_orders",
    "ratio_interval",
    "read_saved",
    "removable",
    "resample_counts",
    "resolve_heads",
    "save_figure",
    "studentized_interval",
    "tails_of",
    "texts_of",
    "write_table_file",
]
