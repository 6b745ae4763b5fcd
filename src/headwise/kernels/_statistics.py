"""Entry point of row statistics: choose a kernel, run it, and report which one ran."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import ShapeError
from headwise.kernels._choose import FALLBACK, choose_for_statistics, preferred_for_statistics
from headwise.kernels.spec import (
    AttentionProblem,
    AttentionRule,
    ComputeStatistics,
    Outline,
    RowRequest,
    RowStatistics,
    SharedRequest,
    StatisticsBuffer,
    outline_of,
    remember,
)


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
    they can (`docs/speed.md`).

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
    known: dict[Outline, Any] = _PREPARED
    outline = None
    if isinstance(request, SharedRequest):
        known = request.prepared
        # Its mask is known; biases and sinks differ from call to call.
        if rule.bias is None and rule.sinks is None and type(rule.scale) is float:
            outline = outline_of(q, k, v, (rule.scale, rule.softcap, backend))
    elif rule.is_static and request.is_static:
        options = (rule, request, backend, preferred_for_statistics(problem))
        outline = outline_of(q, k, v, options)
    compute = None if outline is None else known.get(outline)
    if compute is None:
        _check(request, q, k)
        kernel = choose_for_statistics(problem, request, backend)
        compute = kernel.statistics
        if outline is not None:
            compute = remember(known, outline, kernel.prepare_statistics(problem, request))
    return compute(problem, request)


_PREPARED: dict[Outline, ComputeStatistics] = {}


@torch.no_grad()
def statistics_buffer(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: AttentionRule,
    request: SharedRequest,
    most: int,
) -> StatisticsBuffer | None:
    """A buffer for the statistics of calls that share a rule and a request.

    Preparing and adding up many short calls together takes less time than each by itself.

    Args:
        q, k, v: Those of one of the calls, which is not added.
        most: For how many calls there is room.
    Returns:
        None if the kernel that `row_statistics` would choose has no buffer for them.
    """
    problem = AttentionProblem(q, k, v, rule)
    _check(request, q, k)
    return choose_for_statistics(problem, request).statistics_buffer(problem, request, most)


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
    kernel = choose_for_statistics(AttentionProblem(q, k, v, rule), None)
    missing = kernel.missing_statistics
    return f"{kernel.label} ({missing}: {FALLBACK.label})" if missing else kernel.label
