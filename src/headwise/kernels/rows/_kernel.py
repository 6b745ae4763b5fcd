"""The PyTorch kernel's side of the contract: it computes every rule, anywhere."""

import torch
from torch import Tensor

from headwise.kernels.rows._attend import attend_rows
from headwise.kernels.rows._statistics import KERNEL, rows_statistics
from headwise.kernels.spec import (
    AttentionKernel,
    AttentionRule,
    Extras,
    KernelChoice,
    Named,
    RowRequest,
    RowStatistics,
)


class RowsKernel(AttentionKernel):
    """Blocks of rows in plain PyTorch."""

    name = "rows"
    label = KERNEL

    def why_not(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        dropout_p: float,
        extras: Extras,
    ) -> str | None:
        return None

    def plan(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, reason: str
    ) -> KernelChoice:
        form = "none" if rule.visible is None else "blocks"
        return KernelChoice(self.name, form, packed=True, wide=True, reason=reason)

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
        # Packing heads takes lengths that are fixed: an exported program repeats keys instead.
        if torch.compiler.is_exporting():
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return attend_rows(q, k, v, rule, dropout_p, extras.weights, extras.entropy)

    def why_no_statistics(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, request: RowRequest | None
    ) -> str | None:
        return None

    def statistics(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, request: RowRequest
    ) -> RowStatistics:
        return rows_statistics(q, k, v, rule, request)


ROWS = RowsKernel()
