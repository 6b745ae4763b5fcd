"""What is hidden stays hidden, whatever it holds.

Kernels multiply a hidden value by a weight of 0, and 0 · NaN is NaN. So what is not finite is
zeroed before they see it, and the rows it may reach are marked afterwards.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.kernels._cells import Named
from headwise.kernels._rule import Rule
from headwise.masks import can_look, is_trained


def shielded(
    compute: Callable[[Tensor, Tensor, Tensor], Named],
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
) -> Named:
    """Compute so that what is hidden reaches nothing, not even by 0 · NaN.

    Whatever a kernel lets through turns into NaN, so without gradients it is enough to look at
    the heads. Gradients can go wrong where heads do not: then the inputs are looked at.
    """
    if rule.visible is None:
        return compute(q, k, v)
    if can_look(q) and not is_trained(q, k, v):
        found = compute(q, k, v)
        heads = found["heads"]
        # What is hidden from one query is not from a last one that sees everything.
        telling = heads[:, :, -1:] if rule.visible.ends_open(q.shape[2], k.shape[2]) else heads
        if _all_finite(telling):
            return found
    safe = guard(q, k, v, rule)
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
    finite, gets NaN and gives no gradient. No other row is changed by it. Where nothing is
    hidden there is nothing to do: every row sees every key.
    """
    if rule.visible is None or (can_look(q) and _all_finite(q, k, v)):
        return Guarded(q, k, v, None)
    groups, T = q.shape[1] // k.shape[1], q.shape[2]
    fine = [x.isfinite() for x in (q, k, v)]
    queries, keys, values = (~good.all(-1) for good in fine)
    spoilt_key = (keys | values).repeat_interleave(groups, dim=1)
    sees_spoilt = rule.visible.reaches(spoilt_key, T)
    sees_any = rule.visible.reaches(torch.ones_like(spoilt_key), T)
    q, k, v = (torch.where(good, x, 0.0) for good, x in zip(fine, (q, k, v), strict=True))
    return Guarded(q, k, v, sees_spoilt | (queries & sees_any))


def _all_finite(*tensors: Tensor) -> bool:
    """A sum takes a tenth of the time of a look at each number, and one NaN spoils it."""
    return all(math.isfinite(x.detach().sum()) for x in tensors)
