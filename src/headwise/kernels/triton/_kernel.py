"""The Triton kernel's side of the contract."""

import os

import torch

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

# 0 leaves this kernel out unless it is named; 1 prefers it for statistics also in Triton's
# interpreter, which is slow.
SWITCH = "HEADWISE_TRITON"
HALVES = (torch.bfloat16, torch.float16)


class TritonKernel(AttentionKernel):
    """One pass on a GPU."""

    name = "triton"
    guards_nonfinite = True
    missing_statistics = "top, value and received"

    def why_not(self, problem: AttentionProblem) -> str | None:
        q, k, v, rule, *_ = problem
        learned = (q, k, v) if rule.sinks is None else (q, k, v, rule.sinks)
        if needs_gradient(*learned):
            return "it has no gradients"
        return why_no_gradients_or_dropout(problem) or why_not_triton(problem)

    def is_preferred(self, problem: AttentionProblem) -> bool:
        # Without a mask torch's kernel is faster, and with one it needs a guard, which is slower.
        is_half, is_masked = problem.q.dtype in HALVES, problem.rule.visible is not None
        return is_half and is_masked and problem.q.is_cuda and os.environ.get(SWITCH) != "0"

    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        form = "none" if problem.rule.visible is None else "blocks"
        return KernelChoice(self.name, form, packed=False, wide=True, reason=reason)

    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        return attend_triton(problem)

    def why_no_statistics(
        self, problem: AttentionProblem, request: RowRequest | None
    ) -> str | None:
        return why_not_triton(problem, request)

    def is_preferred_for_statistics(self, problem: AttentionProblem) -> bool:
        switch = os.environ.get(SWITCH)
        return switch != "0" if problem.q.is_cuda else switch == "1"

    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        return triton_statistics(problem, request)


TRITON = TritonKernel()
