"""The table of roles: its rows, its files, and what it says about one head."""

from headwise.roles.results._outcomes import by_nearness, rules_line, rules_of, shown_outcomes
from headwise.roles.results._rows import (
    BEHAVIOUR_LABELS,
    BY_COPYING,
    labels_of_rows,
    length_measures,
    outcomes,
    tested_rows,
)
from headwise.roles.results._shapes import main_roles, shape_line, shapes_summary, signs_of
from headwise.roles.results._table import Roles

__all__ = [
    "BEHAVIOUR_LABELS",
    "BY_COPYING",
    "Roles",
    "by_nearness",
    "labels_of_rows",
    "length_measures",
    "main_roles",
    "outcomes",
    "rules_line",
    "rules_of",
    "shape_line",
    "shapes_summary",
    "shown_outcomes",
    "signs_of",
    "tested_rows",
]
