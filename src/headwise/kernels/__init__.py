"""Attention computed: one function that mixes values, one that says what the weights were like."""

from headwise.kernels._attend import AttendOutput, attend
from headwise.kernels._choose import BACKENDS, Choice, choose
from headwise.kernels._rows import weights_of_rows
from headwise.kernels._rule import Rule
from headwise.kernels._statistics import RowRequest, RowStatistics, row_statistics

__all__ = [
    "BACKENDS",
    "AttendOutput",
    "Choice",
    "RowRequest",
    "RowStatistics",
    "Rule",
    "attend",
    "choose",
    "row_statistics",
    "weights_of_rows",
]
