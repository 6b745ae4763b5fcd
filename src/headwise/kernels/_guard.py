"""What is hidden stays hidden, whatever it holds.

Kernels multiply a hidden value by a weight of 0, and 0 · NaN is NaN; they add −inf to a hidden
logit, and −inf + inf is NaN. So what is not finite, or so large that a product of it may not be,
is zeroed before they see it, and the rows it may reach are marked afterwards.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.kernels._request import Named
from headwise.kernels._rule import Rule
from headwise.masks import can_look, is_trained


def shielded(
    compute: Callable[[Tensor, Tensor, Tensor], Named],
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
    is_flag: bool = False,
) -> Named:
    """Compute so that what is hidden reaches nothing, not even by 0 · NaN.

    Whatever a kernel lets through turns into NaN, so without gradients it is enough to look at
    the heads. Gradients can go wrong where heads do not: then the inputs are looked at.

    Args:
        is_flag: Whether the mask is the kernel's own causal flag. Hidden logits are replaced
            then, not added to, so that only values reach further, and those the last row too.
    """
    if rule.visible is None:
        return compute(q, k, v)
    found = None
    if can_look(q, k, v) and not is_trained(q, k, v):
        found = compute(q, k, v)
        heads = found["heads"]
        # What is added may be mapped over, or learned, where queries, keys and values are not.
        tells = can_look(heads) and not heads.requires_grad
        if tells and is_finite(heads[:, :, -1:] if is_flag else heads):
            return found
    safe = guard(q, k, v, rule)
    if safe.spoilt is None and found is not None:
        return found
    return {name: safe.mark(rows) for name, rows in compute(safe.q, safe.k, safe.v).items()}


class Guarded(NamedTuple):
    """Queries, keys and values that kernels can take, and the rows that are not numbers."""

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    spoilt: Bool[Tensor, "B H T"] | None  # None: no row

    def mark(self, rows: Float[Tensor, "B H T *last"]) -> Float[Tensor, "B H T *last"]:
        """Put NaN into the spoilt rows, from which no gradient comes back."""
        if self.spoilt is None:
            return rows
        spoilt = self.spoilt if rows.ndim == 3 else self.spoilt.unsqueeze(-1)
        return rows.masked_fill(spoilt, math.nan)


def guard(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
) -> Guarded:
    """Keep what is not finite away from the rows that may not attend to it.

    A query that is not finite and sees a key, and a query that sees a key or value that is not
    finite, gets NaN and gives no gradient; so does what is so large that its logits or gradients
    may overflow. No other row is changed by it. Where nothing is hidden there is nothing to do:
    every row sees every key.
    """
    if rule.visible is None or (can_look(q, k, v) and _all_small(q, k, v)):
        return Guarded(q, k, v, None)
    groups, T = q.shape[1] // k.shape[1], q.shape[2]
    product, value = _limits(q.dtype)
    fine = [x.abs() <= limit for x, limit in ((q, product), (k, product), (v, value))]
    queries, keys, values = (~good.all(-1) for good in fine)
    spoilt_key = (keys | values).repeat_interleave(groups, dim=1)
    sees_spoilt = rule.visible.reaches(spoilt_key, T)
    sees_any = rule.visible.reaches(torch.ones_like(spoilt_key), T)
    q, k, v = (torch.where(good, x, 0.0) for good, x in zip(fine, (q, k, v), strict=True))
    return Guarded(q, k, v, sees_spoilt | (queries & sees_any))


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    """Up to where logits cannot overflow, and up to where gradients times values can hardly.

    About 2e16 and 3e32 in float32, in which half precisions are computed.
    """
    highest = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    own = torch.finfo(dtype).max
    return min(own, highest**0.5 / 2**10), min(own, highest / 2**20)


def _all_small(*tensors: Tensor) -> bool:
    """Whether no number is too large, told by sums of squares, which a NaN spoils."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    most = _limits(wide)[0]
    return all(torch.linalg.vector_norm(x.detach(), dtype=wide).item() <= most for x in tensors)


def is_finite(x: Tensor) -> bool:
    """Whether all numbers are, told by their sum: a look at each takes ten times as long."""
    # A sum of many float16 may itself be too large for one.
    wide = torch.float32 if x.dtype == torch.float16 else None
    return math.isfinite(x.sum(dtype=wide).item())
