"""The Triton kernel's side of the contract: heads and statistics of rows from one pass."""

import importlib.util
import os
from functools import cache

import torch

from headwise._torch_private import is_materialized, needs_gradient
from headwise.kernels._contract import (
    AttentionKernel,
    AttentionProblem,
    KernelChoice,
    Named,
    RowRequest,
    RowStatistics,
    why_no_gradients_or_dropout,
)
from headwise.kernels._rule import why_not_lowered
from headwise.kernels.triton._launch import Fields, add_heads, task_of

# Positions are 32-bit numbers.
MOST_TOKENS = 2**31 - 2**10
# Wider heads, or more classes, do not fit next to a multiprocessor.
WIDEST, MOST_CLASSES = 256, 64
# 0 leaves this kernel out unless it is named; 1 prefers it for statistics also in Triton's
# interpreter, which is slow.
SWITCH = "HEADWISE_TRITON"
HALVES = (torch.bfloat16, torch.float16)


class TritonKernel(AttentionKernel):
    """One pass on a GPU."""

    name = "triton"
    guards_nonfinite = True
    missing_statistics = "top, value and received"

    def why_not(self, problem: AttentionProblem, request: RowRequest | None = None) -> str | None:
        q, k, v, rule, *_ = problem
        learned = (q, k, v) if rule.sinks is None else (q, k, v, rule.sinks)
        if request is None and needs_gradient(*learned):
            return "it has no gradients"
        why = why_no_gradients_or_dropout(problem) if request is None else None
        return why or why_not_triton(problem, request)

    def is_preferred(self, problem: AttentionProblem, request: RowRequest | None = None) -> bool:
        switch, is_cuda = os.environ.get(SWITCH), problem.q.is_cuda
        if request is not None:
            return switch != "0" if is_cuda else switch == "1"
        # Without a mask torch's kernel is faster, and with one it needs a guard, which is slower.
        is_half, is_masked = problem.q.dtype in HALVES, problem.rule.visible is not None
        return is_half and is_masked and is_cuda and switch != "0"

    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        form = "none" if problem.rule.visible is None else "blocks"
        return KernelChoice(self.name, form, packed=False, wide=True, reason=reason)

    @torch.no_grad()
    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        """The `heads`, their `lse` and `entropy`. Masked values have no effect."""
        q, names = problem.q, ["lse", *(["entropy"] if problem.extras.entropy else [])]
        task = task_of(problem)
        outputs = {name: q.new_empty(q.shape[:3], dtype=torch.float32) for name in names}
        task |= outputs
        outputs["heads"] = add_heads(task, q.dtype)
        _solve(task)
        return outputs

    @torch.no_grad()
    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        """Statistics of every row, and heads in float32, from one pass over the keys."""
        q, S, rule = problem.q, problem.k.shape[2], problem.rule
        task = task_of(problem) | request.inputs(len(q), S, q.device)
        outputs = {
            name: q.new_empty(shape, dtype=dtype)
            for name, (shape, dtype) in request.outputs(q.shape[:3], rule.sinks is not None).items()
        }
        task |= outputs
        if request.keys is not None:  # Triton has no booleans in memory
            task |= {"N": request.keys.shape[2], "key_seen": outputs["key_seen"].view(torch.uint8)}
        if request.heads:
            outputs["heads"] = add_heads(task, torch.float32)
        _solve(task)
        return RowStatistics(**outputs, kernel="triton")


@cache
def is_installed() -> bool:
    """Whether Triton is installed; it is imported when it is first needed."""
    return importlib.util.find_spec("triton") is not None


def why_not_triton(problem: AttentionProblem, request: RowRequest | None = None) -> str | None:
    """Why the kernel in Triton cannot compute this; None if it can. Never reads tensor values."""
    q, k, v, rule, *_ = problem
    T, S, widest = q.shape[2], k.shape[2], max(q.shape[3], v.shape[3])
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
        return f"it takes widths up to {WIDEST} and {MOST_TOKENS} tokens, not {widest} and {T + S}"
    return why_not_lowered(rule, T, S) or (None if request is None else _why_not_request(request))


def _why_not_request(request: RowRequest) -> str | None:
    """Why these statistics cannot be computed."""
    requested = {"top": request.top, "key_norms": request.key_norms, "received": request.received}
    for name, value in requested.items():
        if value is not None and value is not False:
            return f"it does not compute {name}"
    if request.classes is not None and request.classes.shape[2] > MOST_CLASSES:
        return f"it takes up to {MOST_CLASSES} classes, not {request.classes.shape[2]}"
    return None


def _solve(task: Fields) -> None:
    from headwise.kernels.triton._launch import launch  # Triton is slow to import

    launch(task)


TRITON = TritonKernel()
