"""The door to statistics of rows: choose what computes them, and say which it was."""

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
    RowRequest,
    RowStatistics,
)
from headwise.kernels.triton import TRITON

BACKENDS = ("auto", *(kernel.name for kernel in (NATIVE, TRITON, ROWS)))


@torch.no_grad()
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
    the kernel that computed them: the native one wherever it can (`docs/kernel-choice.md`). The
    kernel in Triton was never measured: it is chosen where it can compute this and
    `HEADWISE_TRITON=1` is set.

    Args:
        backend: "auto", "native" (one pass in C++, on a CPU), "triton" (one pass on a GPU; it has
            no `top`, `key_norms` and `received`) or "rows" (plain PyTorch).
    Raises:
        ArgumentError: the name is unknown, or that kernel cannot compute this.
        ShapeError: a tensor of the request does not fit the texts, queries or keys.
    """
    _check(request, q, k)
    if backend not in BACKENDS:
        raise ArgumentError(
            f"row_statistics: backend={backend!r} is not known. "
            f"Choose one of {', '.join(BACKENDS)}."
        )
    problem = AttentionProblem(q, k, v, rule)
    if backend == "auto":
        return _first(problem, request).statistics(problem, request)
    kernel = BY_NAME[backend]
    if reason := kernel.why_no_statistics(problem, request):
        raise ArgumentError(
            f"row_statistics: backend={backend!r} cannot compute this: {reason}. "
            f"Use backend='auto'."
        )
    return kernel.statistics(problem, request)


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
        if not kernel.is_preferred_for_statistics():
            continue
        if kernel.why_no_statistics(problem, request) is None:
            return kernel
    raise AssertionError("rows compute everything")
