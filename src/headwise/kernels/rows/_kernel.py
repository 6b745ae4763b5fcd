"""The PyTorch kernel's side of the contract: it computes every rule, anywhere."""

import torch

from headwise.kernels.rows._attend import attend_rows
from headwise.kernels.rows._statistics import KERNEL, rows_statistics
from headwise.kernels.spec import (
    AttentionKernel,
    AttentionProblem,
    KernelChoice,
    Named,
    RowRequest,
    RowStatistics,
)


class RowsKernel(AttentionKernel):
    """Blocks of rows in plain PyTorch."""

    name = "rows"
    label = KERNEL

    def why_not(self, problem: AttentionProblem, request: RowRequest | None = None) -> str | None:
        return None

    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        form = "none" if problem.rule.visible is None else "blocks"
        return KernelChoice(self.name, form, packed=True, wide=True, reason=reason)

    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        q, k, v, rule, dropout_p, extras = problem
        # Packing heads takes lengths that are fixed: an exported program repeats keys instead.
        if torch.compiler.is_exporting():
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return attend_rows(q, k, v, rule, dropout_p, extras.weights, extras.entropy)

    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        return rows_statistics(problem, request)


ROWS = RowsKernel()
