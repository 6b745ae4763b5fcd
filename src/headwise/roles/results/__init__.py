"""The table of roles: its rows, its files, and what it says about one head."""

from headwise.roles.results._rows import (
    BEHAVIOUR_LABELS,
    by_nearness,
    labels_of_rows,
    outcomes,
    shown_outcomes,
    tested_rows,
)
from headwise.roles.results._shapes import length_measures, shape_line, shapes_summary, signs_of
from headwise.roles.results._table import Roles

__all__ = [
    "BEHAVIOUR_LABELS",
    "Roles",
    "by_nearness",
    "labels_of_rows",
    "length_measures",
    "outcomes",
    "shape_line",
    "shapes_summary",
    "shown_outcomes",
    "signs_of",
    "tested_rows",
]
