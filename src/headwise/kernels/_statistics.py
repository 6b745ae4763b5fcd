"""The door to statistics of rows: choose what computes them, and say which it was."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError
from headwise.kernels._choose import BY_NAME, KERNELS
from headwise.kernels.native import NATIVE
from headwise.kernels.rows import ROWS
from headwise.kernels.spec import (
    AttentionKernel,
    AttentionProblem,
    AttentionRule,
    DescribeRows,
    Outline,
    RowRequest,
    RowStatistics,
    SharedRequest,
    outline_of,
    remember,
)
from headwise.kernels.triton import TRITON

BACKENDS = ("auto", *(kernel.name for kernel in (NATIVE, TRITON, ROWS)))


def row_statistics(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: AttentionRule,
    request: RowRequest,
    *,
    backend: str = "auto",
) -> RowStatistics:
    """Compute statistics of the weights of every row, in memory linear in the text's length.

    They are exact for every rule (softcap, sinks, biases, any mask), since they are computed from
    the weights themselves. Half precisions are computed in float32. `RowStatistics.kernel` names
    the kernel that computed them: on a GPU the one in Triton and on a CPU the native one, wherever
    they can (`docs/kernel-choice.md`).

    Args:
        backend: "auto", "native" (one pass in C++, on a CPU), "triton" (one pass on a GPU; it has
            no `top`, `key_norms` and `received`) or "rows" (plain PyTorch).
    Raises:
        ArgumentError: the name is unknown, or that kernel cannot compute this.
        ShapeError: a tensor of the request does not fit the texts, queries or keys.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return row_statistics(q, k, v, rule, request, backend=backend)
    problem = AttentionProblem(q, k, v, rule)
    known: dict[Outline, Any] = _DESCRIBERS
    outline = None
    if isinstance(request, SharedRequest):
        known = request.prepared
        # Its mask is known; biases and sinks differ from call to call.
        if rule.bias is None and rule.sinks is None and type(rule.scale) is float:
            outline = outline_of(q, k, v, (rule.scale, rule.softcap, backend))
    elif rule.is_static and request.is_static:
        words = (rule, request, backend, TRITON.is_preferred_for_statistics(problem))
        outline = outline_of(q, k, v, words)
    describe = None if outline is None else known.get(outline)
    if describe is None:
        _check(request, q, k)
        kernel = _choose(problem, request, backend)
        describe = kernel.statistics
        if outline is not None:
            describe = remember(known, outline, kernel.prepare_statistics(problem, request))
    return describe(problem, request)


_DESCRIBERS: dict[Outline, DescribeRows] = {}


def _choose(problem: AttentionProblem, request: RowRequest, backend: str) -> AttentionKernel:
    """The kernel of that name, or the first that can."""
    if backend == "auto":
        return _first(problem, request)
    if backend not in BACKENDS:
        raise ArgumentError(
            f"row_statistics: backend={backend!r} is not known. "
            f"Choose one of {', '.join(BACKENDS)}."
        )
    kernel = BY_NAME[backend]
    if reason := kernel.why_no_statistics(problem, request):
        raise ArgumentError(
            f"row_statistics: backend={backend!r} cannot compute this: {reason}. "
            f"Use backend='auto'."
        )
    return kernel


def _check(request: RowRequest, q: Tensor, k: Tensor) -> None:
    (B, H, T, _), S = q.shape, k.shape[2]
    fitting = {
        "received": (B, T), "keys": (B, T), "classes": (B, S), "key_norms": (B, H, S),
        "query_at": (B, T), "key_at": (B, S),
    }  # fmt: skip
    for name, shape in fitting.items():
        x = getattr(request, name)
        if x is None:
            continue
        count = x.shape[-1:] if name in ("keys", "classes") else ()
        if x.shape not in ((*shape, *count), (1, *shape[1:], *count)):
            raise ShapeError(
                f"row_statistics: {name} of shape {tuple(x.shape)} for {B} texts, {H} heads, "
                f"{T} queries and {S} keys. Give {(*shape, *count)}."
            )


def statistics_kernel(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: AttentionRule,
) -> str:
    """Name the kernel that `row_statistics` chooses for these inputs."""
    label = _first(AttentionProblem(q, k, v, rule)).label
    return f"{label} (top, value and received: {ROWS.label})" if label == TRITON.label else label


def _first(problem: AttentionProblem, request: RowRequest | None = None) -> AttentionKernel:
    """The first kernel that can and is expected to be faster than those after it."""
    for kernel in KERNELS:
        if not kernel.is_preferred_for_statistics(problem):
            continue
        if kernel.why_no_statistics(problem, request) is None:
            return kernel
    raise AssertionError("rows compute everything")
