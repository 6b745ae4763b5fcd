"""What the weights of each row were like, without keeping them.

One narrow door: queries, keys, a rule and a request go in, statistics of rows come out. A
faster kernel has this one function to replace.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.kernels._cells import (
    HIDDEN,
    LN2,
    Cell,
    Named,
    Powers,
    mix,
    over_cells,
    powers_of_cell,
)
from headwise.kernels._guard import guard
from headwise.kernels._rows import log_sum_exp
from headwise.kernels._rule import Rule


@dataclass(frozen=True)
class RowRequest:
    """What to find out about each row. Nothing is computed that was not asked for.

    Cost, as a share of the two matrix products of attention: entropy .12, max_weight and lse
    nothing, distance .12, participation and received .05 each, each column of `keys` a gather
    of one number a row, each of `classes` one column of a matrix product; `top` and
    `key_norms` another .1 each, and the columns once more.

    Attributes:
        entropy: Whether to compute the entropy.
        distance: Whether to compute the mean distance to what is attended to.
        participation: Whether to compute how many keys take part.
        received: The queries whose weights are summed up for each key; None: no such sums.
        keys: For each query, keys whose single weights are wanted; −1 where there is none.
        classes: For each key, its share in every class (usually 0 or 1).
        top: Whether to compute how much of the largest weight falls on `keys` and `classes`.
        key_norms: What each key's weight counts for in shares of the output, `‖v_j W_O[h]‖`.
            What is not finite counts as 0. None: no such shares.
        query_at: Positions of the queries, for distances. None: they stand at the end of the keys.
        key_at: Positions of the keys, for distances.
        heads: Whether to compute the heads too, from the same weights.
    """

    entropy: bool = True
    distance: bool = False
    participation: bool = False
    received: Bool[Tensor, "B T"] | None = None
    keys: Int[Tensor, "B T N"] | None = None
    classes: Float[Tensor, "B S C"] | None = None
    top: bool = False
    key_norms: Float[Tensor, "B H S"] | None = None
    query_at: Int[Tensor, "B T"] | None = None
    key_at: Int[Tensor, "B S"] | None = None
    heads: bool = False


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of every row; None where they were not asked for.

    `n_keys` is how many keys the row may attend to. A row without any has an `lse` and a
    `max_logit` of −inf, shares of the output that are NaN, and zeros elsewhere.
    """

    n_keys: Int[Tensor, "B H T"]
    lse: Float[Tensor, "B H T"]  # ln Σ exp z, sinks included
    max_logit: Float[Tensor, "B H T"]  # after softcap, before bias
    max_weight: Float[Tensor, "B H T"]
    entropy: Float[Tensor, "B H T"] | None = None  # nats, over real keys
    distance: Float[Tensor, "B H T"] | None = None  # Σ p |i − j|
    even_distance: Float[Tensor, "B H T"] | None = None  # the same for even weights
    participation: Float[Tensor, "B H T"] | None = None  # (Σ p)² / Σ p², 1 … n
    received: Float[Tensor, "B H S"] | None = None  # Σ p over queries, in the precision of p
    key_mass: Float[Tensor, "B H T N"] | None = None
    key_top: Float[Tensor, "B H T N"] | None = None  # 1 on the largest weight; ties share it
    key_share: Float[Tensor, "B H T N"] | None = None  # p ‖·‖ / Σ p ‖·‖; NaN where that is 0 / 0
    key_seen: Bool[Tensor, "B H T N"] | None = None  # the key exists and may be attended to
    sink: Float[Tensor, "B H T"] | None = None  # mass lost to the sink; None without one
    class_mass: Float[Tensor, "B H T C"] | None = None
    class_top: Float[Tensor, "B H T C"] | None = None
    class_share: Float[Tensor, "B H T C"] | None = None
    class_keys: Float[Tensor, "B H T C"] | None = None  # visible keys of the class
    heads: Float[Tensor, "B H T Dv"] | None = None


@torch.no_grad()
def row_statistics(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
    request: RowRequest,
) -> RowStatistics:
    """Statistics of the weights of every row, in memory that grows with the text.

    Exact for every rule (softcap, sinks, biases, any mask), since they are computed from the
    weights themselves, a cell at a time. Half precisions are computed in float32.

    Source:
        entropy from the moments of a running softmax: H = ln l − u / l with l = Σ exp(z − m)
        and u = Σ exp(z − m)(z − m).
    """

    if request.heads:  # the rest never multiplies a hidden number by 0
        v = guard(q, k, v, rule).v
    work = torch.promote_types(q.dtype, torch.float32)
    received = q.new_zeros(*q.shape[:2], k.shape[2], dtype=work)

    def compute(cell: Cell) -> Named:
        soft = powers_of_cell(q, k, rule, cell)
        found = _plain(soft) | _on_columns(soft, cell, request)
        if rule.sinks is not None:
            found["sink"] = 1.0 - soft.kept / soft.divisor[..., 0]
        if request.distance:
            found |= _distance(soft, cell, request)
        if request.participation:
            found["participation"] = _participation(soft, rule)
        if request.received is not None:
            received[cell.texts, cell.heads, cell.keys] += _received(soft, cell, request.received)
        if request.heads:
            found["heads"] = mix(cell, soft.powers, v) / soft.divisor
        if request.entropy:  # last: it reuses the logits' memory
            found["entropy"] = _entropy(soft)
        return found

    rows = over_cells(q, k, rule, compute)
    return RowStatistics(**rows, received=None if request.received is None else received)


def _plain(soft: Powers) -> Named:
    b, h, R, n = soft.powers.shape
    if soft.visible is None:
        n_keys = torch.full((b, h, R), n, device=soft.total.device)
    else:
        n_keys = soft.visible.sum(-1).expand(b, h, R)
    return {
        "n_keys": n_keys,
        "lse": log_sum_exp(soft.peak, soft.total),
        "max_logit": soft.max_logit * LN2,
        "max_weight": torch.exp2(soft.highest) / soft.divisor[..., 0],
    }


def _entropy(soft: Powers) -> Float[Tensor, "b h R"]:
    total, divisor = soft.total, soft.divisor[..., 0]
    moment = soft.shifted.mul_(soft.powers).sum(-1)
    log_total = torch.log2(torch.where(total == 0, 1.0, total))
    # A head that reads one key has entropy 0; rounding must not make it negative.
    return ((log_total * soft.kept - moment) / divisor * LN2).clamp_(min=0.0)


def _participation(soft: Powers, rule: Rule) -> Float[Tensor, "b h R"]:
    # A sink far above all logits leaves powers that vanish when they are squared.
    relative, kept = soft.powers, soft.kept
    if rule.sinks is not None:
        relative = torch.exp2(soft.shifted - soft.highest.unsqueeze(-1))
        kept = relative.sum(-1)
    squares = torch.linalg.vector_norm(relative, dim=-1).square()
    seen = soft.highest > HIDDEN / 2
    return torch.where(seen, kept.square() / torch.where(seen, squares, 1.0), 0.0)


def _received(soft: Powers, cell: Cell, queries: Bool[Tensor, "B T"]) -> Float[Tensor, "b h n"]:
    counted = queries[cell.texts, None, cell.rows, None]  # b 1 R 1
    share = torch.where(counted, 1.0 / soft.divisor, 0.0).transpose(-1, -2)
    found = torch.matmul(share, soft.powers)
    if not found.isfinite().all():  # perhaps of a query that does not count
        found = torch.matmul(share, soft.powers.masked_fill(~counted, 0.0))
    return found.squeeze(-2)


def _on_columns(soft: Powers, cell: Cell, request: RowRequest) -> Named:
    """How each measure of the keys falls on single keys and on classes of keys."""
    found: Named = {}
    if request.keys is not None:
        at, found["key_seen"] = _seen(soft, cell, request.keys)
    if request.classes is not None:
        members = request.classes[cell.texts, cell.keys].to(soft.powers.dtype)[:, None]  # b 1 n C
        found["class_keys"] = _members_seen(soft, members)
    if not found:
        return found
    for name, amounts, whole in _measures(soft, cell, request):
        if request.keys is not None:
            part = amounts.gather(-1, at) if amounts.shape[-1] else at.to(amounts.dtype)
            found[f"key_{name}"] = part.masked_fill(~found["key_seen"], 0.0) / whole
        if request.classes is not None:
            found[f"class_{name}"] = torch.matmul(amounts, members) / whole
    return found


def _measures(
    soft: Powers, cell: Cell, request: RowRequest
) -> Iterator[tuple[str, Float[Tensor, "b h R n"], Float[Tensor, "b h R 1"]]]:
    """What each key of a row has of something, and how much of that there is."""
    yield "mass", soft.powers, soft.divisor
    if request.top:
        # By their logits: where all keys are hidden, none of them is the largest.
        highest = torch.where(soft.highest < HIDDEN / 2, torch.inf, soft.highest)
        largest = (soft.shifted == highest.unsqueeze(-1)).to(soft.powers.dtype)
        yield "top", largest, largest.sum(-1, keepdim=True).clamp_(min=1.0)
    if request.key_norms is not None:
        norms = request.key_norms[cell.texts, cell.heads, None, cell.keys].to(soft.powers.dtype)
        parts = soft.powers * norms.where(norms.isfinite(), 0.0)
        yield "share", parts, parts.sum(-1, keepdim=True)


def _seen(
    soft: Powers, cell: Cell, keys: Int[Tensor, "B T N"]
) -> tuple[Int[Tensor, "b h R N"], Bool[Tensor, "b h R N"]]:
    """Where single keys stand in a cell, and whether they exist there and may be attended to."""
    b, h, _, n = soft.powers.shape
    inside = keys[cell.texts, cell.rows] - cell.tile.keys.start  # b R N
    seen = ((inside >= 0) & (inside < n))[:, None].expand(b, h, -1, -1)
    at = inside.clamp(0, max(0, n - 1))[:, None].expand(b, h, -1, -1)
    if soft.visible is not None and n:
        # A mask that is the same for all heads is read for one.
        heads = soft.visible.shape[1]
        seen = seen & soft.visible.expand(b, -1, -1, -1).gather(-1, at[:, :heads])
    return at, seen


def _members_seen(soft: Powers, members: Float[Tensor, "b 1 n C"]) -> Float[Tensor, "b h R C"]:
    b, h, R, _ = soft.powers.shape
    if soft.visible is None:
        counted = members.sum(-2, keepdim=True)
    else:
        counted = torch.matmul(soft.visible.to(members.dtype), members)
    return counted.expand(b, h, R, -1)


def _distance(soft: Powers, cell: Cell, request: RowRequest) -> Named:
    b, h, R, _ = soft.powers.shape
    if request.query_at is None or request.key_at is None:
        query_at, key_at = cell.tile.query_at[None], cell.tile.key_at[None, None]
    else:
        query_at = request.query_at[cell.texts, cell.rows, None]
        key_at = request.key_at[cell.texts, None, cell.keys]
    away = (query_at - key_at).abs().to(soft.powers.dtype)[:, None]  # b 1 R n
    mean = (soft.powers * away).sum(-1) / soft.divisor[..., 0]
    even = (
        away.mean(-1)
        if soft.visible is None
        else ((away * soft.visible).sum(-1) / soft.visible.sum(-1).clamp(min=1))
    )
    return {"distance": mean, "even_distance": even.expand(b, h, R)}
