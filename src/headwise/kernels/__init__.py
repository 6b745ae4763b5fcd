"""Attention: one function that mixes values, and one that describes the weights of each row."""

from headwise.kernels._attend import (
    AttendOutput,
    attend,
    attend_by_rule,
    computes_both_at_once,
    row_statistics,
    statistics_kernel,
)
from headwise.kernels._contract import (
    AttentionProblem,
    Extras,
    KernelChoice,
    RowRequest,
    RowStatistics,
    autocast_inputs,
)
from headwise.kernels._rule import (
    AttentionRule,
    Bias,
    BiasLike,
    MaskLike,
    TensorBias,
    WindowLike,
    check_numbers,
    make_rule,
)
from headwise.kernels.native import is_faster_than_a_call as native_is_faster
from headwise.kernels.native import is_packed
from headwise.kernels.rows import HeadBlock, weights_in_blocks, weights_of_head

__all__ = [
    "AttendOutput",
    "AttentionProblem",
    "AttentionRule",
    "Bias",
    "BiasLike",
    "Extras",
    "HeadBlock",
    "KernelChoice",
    "MaskLike",
    "RowRequest",
    "RowStatistics",
    "TensorBias",
    "WindowLike",
    "attend",
    "attend_by_rule",
    "autocast_inputs",
    "check_numbers",
    "computes_both_at_once",
    "is_packed",
    "make_rule",
    "native_is_faster",
    "row_statistics",
    "statistics_kernel",
    "weights_in_blocks",
    "weights_of_head",
]
