"""Reading: texts and roles laid out once, and what the heads of a model score on them."""

from headwise.roles.evaluation._evaluate import (
    DetailedScores,
    Progress,
    Reader,
    RoleScores,
    check_reads_one_text,
)
from headwise.roles.evaluation._heuristics import OFFSETS, rule_names
from headwise.roles.evaluation._units import Units

__all__ = [
    "OFFSETS",
    "DetailedScores",
    "Progress",
    "Reader",
    "RoleScores",
    "Units",
    "check_reads_one_text",
    "rule_names",
]
