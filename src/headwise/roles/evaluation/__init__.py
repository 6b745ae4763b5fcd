"""Evaluation: items and roles are indexed once, then the heads of any model are scored on them."""

from headwise.roles.evaluation._evaluate import (
    DetailedScores,
    Evaluator,
    RoleScores,
    check_reads_one_text,
)
from headwise.roles.evaluation._relation_index import TIE
from headwise.roles.evaluation._synthetic_heads import OFFSETS, RULES, heuristic_names
from headwise.roles.evaluation._tag_rules import TagRows, fit_tag_rules
from headwise.roles.evaluation._units import Units

__all__ = [
    "OFFSETS",
    "RULES",
    "TIE",
    "DetailedScores",
    "Evaluator",
    "RoleScores",
    "TagRows",
    "Units",
    "check_reads_one_text",
    "fit_tag_rules",
    "heuristic_names",
]
