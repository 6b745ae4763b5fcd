"""The one door to statistics of rows: choose what computes them, and say which it was."""

import os

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._native import library
from headwise.errors import ArgumentError, ShapeError
from headwise.kernels import native, triton
from headwise.kernels._request import RowRequest, RowStatistics
from headwise.kernels._rule import Rule
from headwise.kernels.native import native_statistics
from headwise.kernels.rows import rows_statistics
from headwise.kernels.triton import triton_statistics

BACKENDS = ("auto", "native", "triton", "rows")
# 1 chooses the kernel in Triton wherever it can compute what is asked.
SWITCH = "HEADWISE_TRITON"


@torch.no_grad()
def row_statistics(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
    request: RowRequest,
    *,
    backend: str = "auto",
) -> RowStatistics:
    """Statistics of the weights of every row, in memory that grows with the text.

    Exact for every rule (softcap, sinks, biases, any mask), since they are computed from the
    weights themselves. Half precisions are computed in float32. `RowStatistics.kernel` says what
    computed them: the native kernel wherever it can, which was faster at every size measured
    (`benchmarks/native.py`). The kernel in Triton was never measured: it is chosen where it can
    compute this and `HEADWISE_TRITON=1` says so.

    Args:
        backend: "auto", "native" (one pass in C++, on a CPU), "triton" (one pass on a GPU; it has
            no `top`, `key_norms` and `received`) or "rows" (plain PyTorch).
    Raises:
        ArgumentError: the name is unknown, or that kernel cannot compute this.
        ShapeError: something in the request is of other texts, queries or keys.
    """
    _check(request, q, k)
    if backend not in BACKENDS:
        raise ArgumentError(
            f"row_statistics: backend={backend!r} is not known. "
            f"Choose one of {', '.join(BACKENDS)}."
        )
    given = (q, k, v, rule)
    if backend == "auto":
        backend = _picked(*given, request)
    elif reason := _why_not(backend, *given, request):
        raise ArgumentError(
            f"row_statistics: backend={backend!r} cannot compute this: {reason}. "
            f"Use backend='auto'."
        )
    compute = {"native": native_statistics, "triton": triton_statistics}
    return compute.get(backend, rows_statistics)(*given, request)


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
        own = x.shape[-1:] if name in ("keys", "classes") else ()  # how many there are
        if x.shape not in ((*shape, *own), (1, *shape[1:], *own)):
            raise ShapeError(
                f"row_statistics: {name} of shape {tuple(x.shape)} for {B} texts, {H} heads, "
                f"{T} queries and {S} keys. Give {(*shape, *own)}."
            )


def statistics_kernel(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
) -> str:
    """What `row_statistics` computes with, if it is left to choose."""
    names = {"native": f"native ({library().name})", "rows": "blocks of rows"}
    names["triton"] = f"triton (top, value and received: {names['rows']})"
    return names[_picked(q, k, v, rule)]


def _picked(q: Tensor, k: Tensor, v: Tensor, rule: Rule, request: RowRequest | None = None) -> str:
    wanted = ("triton", "native") if os.environ.get(SWITCH) == "1" else ("native",)
    for name in wanted:
        if _why_not(name, q, k, v, rule, request) is None:
            return name
    return "rows"


def _why_not(
    name: str, q: Tensor, k: Tensor, v: Tensor, rule: Rule, request: RowRequest | None
) -> str | None:
    """Why a kernel does not compute this; None: it does."""
    if name == "native":
        return native.cannot_describe(q, k, v, rule)
    return triton.cannot(q, k, v, rule, request) if name == "triton" else None
