"""What all kernels share: the rule of an attention, requests and results, and their contract."""

from headwise._torch_private import Outline, under_autocast
from headwise.kernels.spec._bias import Bias, TensorBias
from headwise.kernels.spec._kernel import (
    AttentionKernel,
    ComputeHeads,
    ComputeStatistics,
    KernelChoice,
    SolveHeads,
    StatisticsBuffer,
    why_no_gradients_or_dropout,
)
from headwise.kernels.spec._lowered import Lowered, lower, rule_from_lowered, why_not_lowered
from headwise.kernels.spec._nonfinite import (
    Guarded,
    compute_guarded,
    guard_nonfinite,
)
from headwise.kernels.spec._problem import (
    HEADS_ALONE,
    AttentionProblem,
    Extras,
    autocast_inputs,
    outline_of,
    remember,
)
from headwise.kernels.spec._request import OF_MASK, Named, RowRequest, RowStatistics, SharedRequest
from headwise.kernels.spec._rule import (
    AttentionRule,
    BiasLike,
    MaskLike,
    Sinks,
    WindowLike,
    check_rule,
    make_rule,
)

__all__ = [
    "HEADS_ALONE",
    "OF_MASK",
    "AttentionKernel",
    "AttentionProblem",
    "AttentionRule",
    "Bias",
    "BiasLike",
    "ComputeHeads",
    "ComputeStatistics",
    "Extras",
    "Guarded",
    "KernelChoice",
    "Lowered",
    "MaskLike",
    "Named",
    "Outline",
    "RowRequest",
    "RowStatistics",
    "SharedRequest",
    "Sinks",
    "SolveHeads",
    "StatisticsBuffer",
    "TensorBias",
    "WindowLike",
    "autocast_inputs",
    "check_rule",
    "compute_guarded",
    "guard_nonfinite",
    "lower",
    "make_rule",
    "outline_of",
    "remember",
    "rule_from_lowered",
    "under_autocast",
    "why_no_gradients_or_dropout",
    "why_not_lowered",
]
