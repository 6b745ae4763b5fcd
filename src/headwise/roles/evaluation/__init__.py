"""Evaluation: items and roles are indexed once, then the heads of any model are scored on them."""

from headwise.roles.evaluation._evaluate import (
    DetailedScores,
    Evaluator,
    RoleScores,
    check_reads_one_text,
)
from headwise.roles.evaluation._heuristics import OFFSETS, heuristic_names
from headwise.roles.evaluation._units import Units

__all__ = [
    "OFFSETS",
    "DetailedScores",
    "Evaluator",
    "RoleScores",
    "Units",
    "check_reads_one_text",
    "heuristic_names",
]
