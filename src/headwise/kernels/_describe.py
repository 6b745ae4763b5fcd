"""The one door to statistics of rows: choose what computes them, and say which it was."""

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._native import library
from headwise.errors import ArgumentError
from headwise.kernels import _statistics
from headwise.kernels._rule import Rule
from headwise.kernels._statistics import RowRequest, RowStatistics
from headwise.kernels.native import cannot_describe, native_statistics


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
    (`benchmarks/native.py`).

    Args:
        backend: "auto", "native" (one pass in C++, on a CPU) or "rows" (plain PyTorch).
    Raises:
        ArgumentError: the name is unknown, or the native kernel cannot compute this.
    """
    if backend not in ("auto", "native", "rows"):
        raise ArgumentError(
            f"row_statistics: backend={backend!r} is not known. Choose auto, native or rows."
        )
    reason = "rows was asked for" if backend == "rows" else cannot_describe(q, k, v, rule)
    if reason is None:
        return native_statistics(q, k, v, rule, request)
    if backend == "native":
        raise ArgumentError(
            f"row_statistics: backend='native' cannot compute this: {reason}. Use backend='auto'."
        )
    return _statistics.row_statistics(q, k, v, rule, request)


def statistics_kernel(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
) -> str:
    """What `row_statistics` computes with, if it is left to choose."""
    return (
        f"native ({library().name})" if cannot_describe(q, k, v, rule) is None else "blocks of rows"
    )
