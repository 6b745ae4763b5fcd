"""The Triton kernel's side of the contract: heads and statistics of rows from one pass."""

import importlib.util
import os
from collections.abc import Mapping
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._torch_private import is_materialized, needs_gradient
from headwise.kernels._contract import (
    AttentionKernel,
    AttentionProblem,
    KernelChoice,
    Named,
    RowReduction,
    RowRequest,
    RowStatistics,
    why_no_gradients_or_dropout,
)
from headwise.kernels._rule import why_not_lowered

# Positions are 32-bit numbers.
MOST_TOKENS = 2**31 - 2**10
# Wider heads, or more classes, do not fit next to a multiprocessor.
WIDEST, MOST_CLASSES = 256, 64
# 0 leaves this kernel out unless it is named; 1 prefers it for statistics also in Triton's
# interpreter, which is slow.
SWITCH = "HEADWISE_TRITON"
HALVES = (torch.bfloat16, torch.float16)


@cache
def is_installed() -> bool:
    """Whether Triton is installed; it is imported when it is first needed."""
    return importlib.util.find_spec("triton") is not None


class TritonKernel(AttentionKernel):
    """One pass on a GPU."""

    name = "triton"
    guards_nonfinite = True

    def why_not(self, problem: AttentionProblem, request: RowRequest | None = None) -> str | None:
        q, k, v, rule, *_ = problem
        T, S, widest = q.shape[2], k.shape[2], max(q.shape[3], v.shape[3])
        learned = (q, k, v) if rule.sinks is None else (q, k, v, rule.sinks)
        if request is None and needs_gradient(*learned):
            return "it has no gradients"
        if request is None and (why := why_no_gradients_or_dropout(problem)):
            return why
        if not is_installed():
            return "Triton is not installed (pip install 'headwise[triton]')"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it does not compute in {q.dtype}"
        if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"these tensors are on {q.device}, and TRITON_INTERPRET is not 1"
        if q.device.type != "cuda" and q.dtype == torch.bfloat16:
            return "Triton's interpreter does not multiply bfloat16"
        if not is_materialized(q, k, v, *rule.sample(T, S, q.device)):
            return "these are not plain tensors: some are mapped over, or traced"
        if widest > WIDEST or T + S > MOST_TOKENS:
            sizes = f"{widest} and {T + S}"
            return f"it takes widths up to {WIDEST} and {MOST_TOKENS} tokens, not {sizes}"
        return why_not_lowered(rule, T, S)

    def lacks(self, request: RowRequest) -> Mapping[str, str]:
        lacking = {"top": "top", "key_norms": "value"}
        if request.classes is not None and (n := request.classes.shape[2]) > MOST_CLASSES:
            lacking["classes"] = f"{n} classes, more than {MOST_CLASSES}"
        return lacking

    def is_preferred(self, problem: AttentionProblem, request: RowRequest | None = None) -> bool:
        switch, is_cuda = os.environ.get(SWITCH), problem.q.is_cuda
        if request is not None:
            return switch != "0" if is_cuda else switch == "1"
        # Without a mask torch's kernel is faster, and with one it needs a guard, which is slower.
        is_half, is_masked = problem.q.dtype in HALVES, problem.rule.visible is not None
        return is_half and is_masked and is_cuda and switch != "0"

    # Triton takes half a second to import, and may not be installed.
    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        """The `heads`, their `lse` and `entropy`. Masked values have no effect."""
        from headwise.kernels.triton._launch import compute_heads

        return compute_heads(problem)

    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        """Statistics of every row, and heads in float32, from one pass over the keys."""
        from headwise.kernels.triton._launch import compute_statistics

        return compute_statistics(problem, request)

    def row_sums(
        self, problem: AttentionProblem, request: RowRequest, reduction: RowReduction
    ) -> tuple[Float[Tensor, "3 K M H"], Float[Tensor, "K H"]]:
        """Sums by text and head of statistics of rows, which stay on the chip.

        Returns:
            The number of rows, the sums over them, and those under uniform weights, NaN where that
            has no meaning; and the largest values, −inf where no row counts.
        """
        from headwise.kernels.triton._launch import compute_sums

        return compute_sums(problem, request, reduction)


TRITON = TritonKernel()
