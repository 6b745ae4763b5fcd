"""The nonfinite guard: what is masked reaches no other row, even if it is NaN or infinite.

Kernels multiply a masked value by a weight of 0, and 0 · NaN is NaN; they add −inf to a masked
logit, and −inf + inf is NaN. So values that are not finite, or so large that a product may not
be, are replaced by zeros before a kernel reads them, and the rows that see them become NaN.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise._torch_private import can_read, needs_gradient
from headwise.kernels.spec._kernel import AttentionProblem
from headwise.kernels.spec._request import Named


def compute_guarded(
    compute: Callable[[AttentionProblem], Named], problem: AttentionProblem, is_flag: bool = False
) -> Named:
    """Compute with the guard, where it is needed.

    Without gradients it is enough to check the heads: a nonfinite value that gets through a mask
    makes some of them NaN. Gradients can be NaN where heads are not, so with gradients the inputs
    are checked.

    Args:
        is_flag: Whether the mask is the kernel's own causal flag. Masked logits are then replaced
            and not added to, so that only values get through, and always into the last row.
    """
    if problem.rule.visible is None:
        return compute(problem)
    result, qkv = None, problem[:3]
    if can_read(*qkv) and not needs_gradient(*qkv):
        result = compute(problem)
        heads = result["heads"]
        # A bias may be mapped over, or learned, where queries, keys and values are not.
        is_enough = can_read(heads) and not heads.requires_grad
        if is_enough and is_finite(heads.select(2, -1) if is_flag else heads):
            return result
    safe = guard_nonfinite(problem)
    if safe.nan_rows is None and result is not None:
        return result
    return {name: safe.mark(rows) for name, rows in compute(safe.problem).items()}


class Guarded(NamedTuple):
    """A problem without nonfinite queries, keys and values, and the rows that become NaN."""

    problem: AttentionProblem
    nan_rows: Bool[Tensor, "B H T"] | None  # None: no row

    def mark(self, rows: Float[Tensor, "B H T *last"]) -> Float[Tensor, "B H T *last"]:
        """Set these rows to NaN; no gradient flows back from them."""
        if self.nan_rows is None:
            return rows
        nan_rows = self.nan_rows if rows.ndim == 3 else self.nan_rows.unsqueeze(-1)
        return rows.masked_fill(nan_rows, math.nan)


def guard_nonfinite(problem: AttentionProblem) -> Guarded:
    """Replace nonfinite values by zeros, and find the rows that may attend to them.

    The result of a query is NaN, without gradient, if the query is not finite and sees a key, or
    if it sees a key or value that is not finite. Values so large that logits or gradients may
    overflow count as not finite. No other row changes. Without a mask there is nothing to do:
    every row sees every key.
    """
    q, k, v, rule, *_ = problem
    if rule.visible is None or (can_read(q, k, v) and _all_small(q, k, v)):
        return Guarded(problem, None)
    groups, T = q.shape[1] // k.shape[1], q.shape[2]
    product, value = _limits(q.dtype)
    is_small = [x.abs() <= limit for x, limit in ((q, product), (k, product), (v, value))]
    queries, keys, values = (~small.all(-1) for small in is_small)
    nonfinite_key = (keys | values).repeat_interleave(groups, dim=1)
    sees_nonfinite = rule.visible.reaches(nonfinite_key, T)
    sees_any = rule.visible.reaches(torch.ones_like(nonfinite_key), T)
    q, k, v = (torch.where(small, x, 0.0) for small, x in zip(is_small, (q, k, v), strict=True))
    safe = problem._replace(q=q, k=k, v=v)
    return Guarded(safe, sees_nonfinite | (queries & sees_any))


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    """The largest queries and keys whose logits cannot overflow, and the largest values.

    About 2e16 and 3e32 in float32, in which half precisions are computed. Values of that size
    times usual gradients do not overflow.
    """
    highest = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    own = torch.finfo(dtype).max
    return min(own, highest**0.5 / 2**10), min(own, highest / 2**20)


def _all_small(*tensors: Tensor) -> bool:
    """Whether no number is too large, by sums of squares, which a NaN makes NaN."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    most = _limits(wide)[0]
    return all(torch.linalg.vector_norm(x.detach(), dtype=wide).item() <= most for x in tensors)


def is_finite(x: Tensor) -> bool:
    """Whether all numbers are finite, by their sum, which is faster than checking each."""
    # A sum of many float16 may itself be too large for one.
    wide = torch.float32 if x.dtype == torch.float16 else None
    return math.isfinite(x.sum(dtype=wide).item())
