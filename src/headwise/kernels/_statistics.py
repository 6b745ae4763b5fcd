"""Entry point of row statistics: choose a kernel, run it, and report which one ran."""

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import ShapeError
from headwise.kernels._choose import FALLBACK, kernel_for
from headwise.kernels.spec import AttentionProblem, AttentionRule, RowRequest, RowStatistics


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
    the kernel that computed them: on a GPU the one in Triton and on a CPU the native one, wherever
    they can (`docs/speed.md`).

    Args:
        backend: "auto", "native" (one pass in C++, on a CPU), "triton" (one pass on a GPU; it has
            no `top`, `key_norms` and `received`) or "rows" (plain PyTorch).
    Raises:
        ArgumentError: the name is unknown, or that kernel cannot compute this.
        ShapeError: a tensor of the request does not fit the texts, queries or keys.
    """
    _check(request, q, k)
    problem = AttentionProblem(q, k, v, rule)
    kernel, _ = kernel_for(problem, request, backend)
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
    kernel, _ = kernel_for(AttentionProblem(q, k, v, rule), RowRequest())
    missing = kernel.missing_statistics
    return f"{kernel.label} ({missing}: {FALLBACK.label})" if missing else kernel.label
