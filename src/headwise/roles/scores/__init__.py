"""Scores of heads on roles: items and roles are indexed once, then any model is scored on them."""

from headwise.roles.scores._eligible import right_share
from headwise.roles.scores._heuristics import OFFSETS, RULES, heuristic_names
from headwise.roles.scores._scores import (
    Evaluator,
    RoleScores,
    check_reads_one_text,
    rows_of_batches,
)
from headwise.roles.scores._tag_rules import TagRows, fit_tag_rules

__all__ = [
    "OFFSETS",
    "RULES",
    "Evaluator",
    "RoleScores",
    "TagRows",
    "check_reads_one_text",
    "fit_tag_rules",
    "heuristic_names",
    "right_share",
    "rows_of_batches",
]
