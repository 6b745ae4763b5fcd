"""The Triton kernel's side of the contract: it was never measured, so it is taken by name only."""

import os

from torch import Tensor

from headwise._torch_private import needs_gradient
from headwise.kernels.spec import (
    AttentionKernel,
    AttentionRule,
    Extras,
    KernelChoice,
    Named,
    RowRequest,
    RowStatistics,
    why_no_gradients_or_dropout,
)
from headwise.kernels.triton._compute import attend_triton, triton_statistics, why_not_triton

# 1 prefers this kernel for statistics wherever it can compute them.
SWITCH = "HEADWISE_TRITON"


class TritonKernel(AttentionKernel):
    """One pass on a GPU."""

    name = "triton"
    guards_nonfinite = True

    def why_not(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        dropout_p: float,
        extras: Extras,
    ) -> str | None:
        learned = (q, k, v) if rule.sinks is None else (q, k, v, rule.sinks)
        if needs_gradient(*learned):
            return "it has no gradients"
        return why_no_gradients_or_dropout(q, k, rule, dropout_p) or why_not_triton(q, k, v, rule)

    def is_preferred(self, q: Tensor, k: Tensor) -> bool:
        return False

    def plan(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, reason: str
    ) -> KernelChoice:
        form = "none" if rule.visible is None else "blocks"
        return KernelChoice(self.name, form, packed=False, wide=True, reason=reason)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        choice: KernelChoice,
        dropout_p: float,
        extras: Extras,
    ) -> Named:
        return attend_triton(q, k, v, rule, extras.entropy)

    def why_no_statistics(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, request: RowRequest | None
    ) -> str | None:
        return why_not_triton(q, k, v, rule, request)

    def is_preferred_for_statistics(self) -> bool:
        return os.environ.get(SWITCH) == "1"

    def statistics(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, request: RowRequest
    ) -> RowStatistics:
        return triton_statistics(q, k, v, rule, request)


TRITON = TritonKernel()
