"""The Triton kernel's side of the contract: it was never measured, so it is taken by name only."""

import os

from headwise._torch_private import needs_gradient
from headwise.kernels.spec import (
    AttentionKernel,
    AttentionProblem,
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

    def why_not(self, problem: AttentionProblem) -> str | None:
        q, k, v, rule, *_ = problem
        learned = (q, k, v) if rule.sinks is None else (q, k, v, rule.sinks)
        if needs_gradient(*learned):
            return "it has no gradients"
        return why_no_gradients_or_dropout(problem) or why_not_triton(problem)

    def is_preferred(self, problem: AttentionProblem) -> bool:
        return False

    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        form = "none" if problem.rule.visible is None else "blocks"
        return KernelChoice(self.name, form, packed=False, wide=True, reason=reason)

    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        return attend_triton(problem)

    def why_no_statistics(
        self, problem: AttentionProblem, request: RowRequest | None
    ) -> str | None:
        return why_not_triton(problem, request)

    def is_preferred_for_statistics(self) -> bool:
        return os.environ.get(SWITCH) == "1"

    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        return triton_statistics(problem, request)


TRITON = TritonKernel()
