"""The table of roles: its rows, its files, and what it says about one head."""

from headwise.roles.results._rows import outcomes, tested_rows
from headwise.roles.results._shapes import length_measures, shape_line, shapes_summary, signs_of
from headwise.roles.results._table import Roles

__all__ = [
    "Roles",
    "length_measures",
    "outcomes",
    "shape_line",
    "shapes_summary",
    "signs_of",
    "tested_rows",
]
