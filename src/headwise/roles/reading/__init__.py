"""Reading: texts and roles laid out once, and what the heads of a model score on them."""

from headwise.roles.reading._read import Closely, Measured, Progress, Reader
from headwise.roles.reading._rules import OFFSETS, rule_names

__all__ = ["OFFSETS", "Closely", "Measured", "Progress", "Reader", "rule_names"]
