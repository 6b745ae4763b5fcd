"""What all kernels share: the rule of an attention, requests and results, and their contract."""

from headwise.kernels.spec._bias import Bias, TensorBias
from headwise.kernels.spec._kernel import (
    AttentionKernel,
    AttentionProblem,
    ComputeHeads,
    Extras,
    KernelChoice,
    autocast_inputs,
    why_no_gradients_or_dropout,
)
from headwise.kernels.spec._lowered import Lowered, lower, rule_from_lowered, why_not_lowered
from headwise.kernels.spec._nonfinite import Guarded, compute_guarded, guard_nonfinite, is_finite
from headwise.kernels.spec._request import Named, RowRequest, RowStatistics
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
    "AttentionKernel",
    "AttentionProblem",
    "AttentionRule",
    "Bias",
    "BiasLike",
    "ComputeHeads",
    "Extras",
    "Guarded",
    "KernelChoice",
    "Lowered",
    "MaskLike",
    "Named",
    "RowRequest",
    "RowStatistics",
    "Sinks",
    "TensorBias",
    "WindowLike",
    "autocast_inputs",
    "check_rule",
    "compute_guarded",
    "guard_nonfinite",
    "is_finite",
    "lower",
    "make_rule",
    "rule_from_lowered",
    "why_no_gradients_or_dropout",
    "why_not_lowered",
]
