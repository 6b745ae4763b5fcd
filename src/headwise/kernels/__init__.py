"""Attention: one function that mixes values, and one that describes the weights of each row."""

from headwise.kernels._attend import (
    AttendOutput,
    attend,
    plain_outline,
    prepare_plain,
)
from headwise.kernels._choose import choose, computes_both_at_once
from headwise.kernels._statistics import row_statistics, statistics_buffer, statistics_kernel
from headwise.kernels.native import is_faster_than_a_call as native_is_faster
from headwise.kernels.native import is_packed, is_shorter_than_a_call
from headwise.kernels.rows import HeadBlock, weights_in_blocks, weights_of_head
from headwise.kernels.spec import (
    OF_MASK,
    AttentionProblem,
    AttentionRule,
    Bias,
    BiasLike,
    ComputeHeads,
    KernelChoice,
    MaskLike,
    Outline,
    RowRequest,
    RowStatistics,
    SharedRequest,
    StatisticsBuffer,
    TensorBias,
    WindowLike,
    autocast_inputs,
    make_rule,
    remember,
    under_autocast,
)

__all__ = [
    "OF_MASK",
    "AttendOutput",
    "AttentionProblem",
    "AttentionRule",
    "Bias",
    "BiasLike",
    "ComputeHeads",
    "HeadBlock",
    "KernelChoice",
    "MaskLike",
    "Outline",
    "RowRequest",
    "RowStatistics",
    "SharedRequest",
    "StatisticsBuffer",
    "TensorBias",
    "WindowLike",
    "attend",
    "autocast_inputs",
    "choose",
    "computes_both_at_once",
    "is_packed",
    "is_shorter_than_a_call",
    "make_rule",
    "native_is_faster",
    "plain_outline",
    "prepare_plain",
    "remember",
    "row_statistics",
    "statistics_buffer",
    "statistics_kernel",
    "under_autocast",
    "weights_in_blocks",
    "weights_of_head",
]
