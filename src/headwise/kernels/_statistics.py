"""What the weights of each row were like, without keeping them.

One narrow door: queries, keys, a rule and a request go in, statistics of rows come out. A
faster kernel has this one function to replace.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.kernels._cells import LN2, Cell, Named, Powers, mix, over_cells, powers_of_cell
from headwise.kernels._guard import guard
from headwise.kernels._rows import log_sum_exp
from headwise.kernels._rule import Rule


@dataclass(frozen=True)
class RowRequest:
    """What to find out about each row. Nothing is computed that was not asked for.

    Cost, as a share of the two matrix products of attention: entropy .12, max_weight and lse
    nothing, distance .12, each column of `keys` a gather of one number a row, each of
    `classes` one column of a matrix product.

    Attributes:
        entropy: Whether to compute the entropy.
        distance: Whether to compute the mean distance to what is attended to.
        keys: For each query, keys whose single weights are wanted; −1 where there is none.
        classes: For each key, its share in every class (usually 0 or 1).
        query_at: Positions of the queries, for distances. None: they stand at the end of the keys.
        key_at: Positions of the keys, for distances.
        heads: Whether to compute the heads too, from the same weights.
    """

    entropy: bool = True
    distance: bool = False
    keys: Int[Tensor, "B T N"] | None = None
    classes: Float[Tensor, "B S C"] | None = None
    query_at: Int[Tensor, "B T"] | None = None
    key_at: Int[Tensor, "B S"] | None = None
    heads: bool = False


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of every row; None where they were not asked for.

    `n_keys` is how many keys the row may attend to. A row without any has an `lse` and a
    `max_logit` of −inf and zeros elsewhere.
    """

    n_keys: Int[Tensor, "B H T"]
    lse: Float[Tensor, "B H T"]  # ln Σ exp z, sinks included
    max_logit: Float[Tensor, "B H T"]  # after softcap, before bias
    max_weight: Float[Tensor, "B H T"]
    entropy: Float[Tensor, "B H T"] | None = None  # nats, over real keys
    distance: Float[Tensor, "B H T"] | None = None  # Σ p |i − j|
    even_distance: Float[Tensor, "B H T"] | None = None  # the same for even weights
    key_mass: Float[Tensor, "B H T N"] | None = None
    key_seen: Bool[Tensor, "B H T N"] | None = None  # the key exists and may be attended to
    sink: Float[Tensor, "B H T"] | None = None  # mass lost to the sink; None without one
    class_mass: Float[Tensor, "B H T C"] | None = None
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

    def compute(cell: Cell) -> Named:
        soft = powers_of_cell(q, k, rule, cell)
        found = _plain(soft)
        if rule.sinks is not None:
            found["sink"] = 1.0 - soft.powers.sum(-1) / soft.divisor[..., 0]
        if request.keys is not None:
            found |= _on_keys(soft, cell, request.keys)
        if request.classes is not None:
            found |= _on_classes(soft, cell, request.classes)
        if request.distance:
            found |= _distance(soft, cell, request)
        if request.heads:
            found["heads"] = mix(cell, soft.powers, v) / soft.divisor
        if request.entropy:  # last: it reuses the logits' memory
            found["entropy"] = _entropy(soft)
        return found

    return RowStatistics(**over_cells(q, k, rule, compute))


def _plain(soft: Powers) -> Named:
    b, h, R, n = soft.powers.shape
    if soft.visible is None:
        n_keys = torch.full((b, h, R), n, device=soft.total.device)
    else:
        n_keys = soft.visible.sum(-1).expand(b, h, R)
    most = soft.powers.amax(-1) if n else torch.zeros_like(soft.total)
    return {
        "n_keys": n_keys,
        "lse": log_sum_exp(soft.peak, soft.total),
        "max_logit": soft.max_logit * LN2,
        "max_weight": most / soft.divisor[..., 0],
    }


def _entropy(soft: Powers) -> Float[Tensor, "b h R"]:
    total, divisor = soft.total, soft.divisor[..., 0]
    # Without sinks the weights sum to 1; with them the rest has gone to the sink.
    kept = soft.powers.sum(-1)
    moment = soft.shifted.mul_(soft.powers).sum(-1)
    log_total = torch.log2(torch.where(total == 0, 1.0, total))
    # A head that reads one key has entropy 0; rounding must not make it negative.
    return ((log_total * kept - moment) / divisor * LN2).clamp_(min=0.0)


def _on_keys(soft: Powers, cell: Cell, keys: Int[Tensor, "B T N"]) -> Named:
    b, h, R, n = soft.powers.shape
    inside = keys[cell.texts, cell.rows] - cell.tile.keys.start  # b R N
    exists = (inside >= 0) & (inside < n)
    at = inside.clamp(0, max(0, n - 1))[:, None]  # b 1 R N
    if n == 0:
        nothing = exists[:, None].expand(b, h, -1, -1)
        return {"key_mass": nothing.to(soft.total.dtype), "key_seen": nothing}
    mass = soft.powers.gather(-1, at.expand(b, h, -1, -1)) / soft.divisor
    seen = exists[:, None]
    if soft.visible is not None:
        visible = soft.visible.expand(b, soft.visible.shape[1], R, n)
        seen = seen & visible.gather(-1, at.expand(-1, visible.shape[1], -1, -1))
    seen = seen.expand_as(mass)
    return {"key_mass": mass.masked_fill_(~seen, 0.0), "key_seen": seen}


def _on_classes(soft: Powers, cell: Cell, classes: Float[Tensor, "B S C"]) -> Named:
    b, h, R, n = soft.powers.shape
    members = classes[cell.texts, cell.keys].to(soft.powers.dtype)[:, None]  # b 1 n C
    visible = soft.visible
    if visible is None:
        visible = torch.ones(1, 1, R, n, dtype=torch.bool, device=members.device)
    counted = torch.matmul(visible.to(members.dtype), members)
    mass = torch.matmul(soft.powers, members) / soft.divisor
    return {"class_mass": mass, "class_keys": counted.expand(b, h, -1, -1)}


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
