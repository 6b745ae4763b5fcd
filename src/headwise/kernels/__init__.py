"""Attention computed: one function that mixes values, one that says what the weights were like."""

from headwise.kernels._attend import AttendOutput, attend, under_autocast
from headwise.kernels._bias import Bias, Given
from headwise.kernels._choose import BACKENDS, Choice, choose
from headwise.kernels._describe import row_statistics, statistics_kernel
from headwise.kernels._request import RowRequest, RowStatistics
from headwise.kernels._rule import BiasLike, MaskLike, Rule, WindowLike, make_rule
from headwise.kernels.rows import HeadBlock, weights_in_blocks, weights_of_head

__all__ = [
    "BACKENDS",
    "AttendOutput",
    "Bias",
    "BiasLike",
    "Choice",
    "Given",
    "HeadBlock",
    "MaskLike",
    "RowRequest",
    "RowStatistics",
    "Rule",
    "WindowLike",
    "attend",
    "choose",
    "make_rule",
    "row_statistics",
    "statistics_kernel",
    "under_autocast",
    "weights_in_blocks",
    "weights_of_head",
]
