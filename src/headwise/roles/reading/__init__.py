"""Reading: texts and roles laid out once, and what the heads of a model score on them."""

from headwise.roles.reading._frame import Frame
from headwise.roles.reading._read import (
    Closely,
    Measured,
    Progress,
    Reader,
    check_reads_one_text,
)
from headwise.roles.reading._rules import OFFSETS, rule_names

__all__ = [
    "OFFSETS",
    "Closely",
    "Frame",
    "Measured",
    "Progress",
    "Reader",
    "check_reads_one_text",
    "rule_names",
]
