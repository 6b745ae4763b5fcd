"""Heads and weights a block of rows at a time: every rule, any device, no array of T x S."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise._torch_private import is_under_func_gradient, needs_gradient
from headwise.kernels._contract import Named
from headwise.kernels._rule import AttentionRule
from headwise.kernels.rows._cells import (
    CELL,
    LN2,
    LOG2E,
    Cell,
    Powers,
    Scratch,
    base2_logits,
    in_double,
    mix,
    over_cells,
    positive,
    powers_of_cell,
    restore_dtype,
)
from headwise.masks.tiles import Tile

# Far enough below 0 that two to that power is 0 in float64, too.
VANISHED = -2000.0


def attend_rows(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: AttentionRule,
    dropout_p: float = 0.0,
    keep_weights: bool = False,
    entropy: bool = False,
    rows: range | None = None,
) -> Named:
    """The `heads`, their `lse`, and if requested the `weights` and `entropy` (before dropout).

    They are those of all queries, or of some `rows`.

    In training each block is recomputed in the backward pass, so that no `T` x `S` array is kept
    for it either.
    """
    dtype = q.dtype
    q, k, v = in_double(q, k, v, rule)

    def compute(cell: Cell) -> Named:
        soft = powers_of_cell(q, k, rule, cell)
        weights = soft.powers / soft.divisor
        results = {
            "heads": mix(cell, F.dropout(weights, dropout_p) if dropout_p else weights, v),
            "lse": log_sum_exp(soft.peak, soft.total),
        }
        if keep_weights:
            results["weights"] = _all_keys(weights, cell)
        if entropy:
            results["entropy"] = _entropy(soft, weights)
        return results

    again = needs_gradient(q, k, v) and not keep_weights and not is_under_func_gradient(q, k, v)
    results = over_cells(
        q,
        k,
        rule,
        lambda cell: checkpoint(compute, cell, use_reentrant=False) if again else compute(cell),
        rows,
    )
    results = restore_dtype(results, dtype, rule)
    return results | {"heads": results["heads"].to(dtype)}


def weights_of_head(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    rule: AttentionRule,
    head: int,
    rows: range | None = None,
) -> Float[Tensor, "B R S"]:
    """The exact weights of one head, for some queries or all of them."""
    dtype = q.dtype
    q, k, _ = in_double(q, k, k, rule)
    T, S = q.shape[2], k.shape[2]
    rows = range(T) if rows is None else rows
    kv_head = head // (q.shape[1] // k.shape[1])
    cell = Cell(
        texts=slice(None),
        kv_heads=slice(kv_head, kv_head + 1),
        heads=slice(head, head + 1),
        tile=Tile(T, S, rows, rule.extent(rows, T, S), q.device),
    )
    soft = powers_of_cell(q, k, rule, cell)
    weights = _all_keys(soft.powers / soft.divisor, cell)[:, 0]
    return restore_dtype({"weights": weights}, dtype, rule)["weights"]


@dataclass(frozen=True)
class HeadBlock:
    """Several heads of a layer: their weights, and each row's entropy (nats, over real keys)."""

    heads: slice
    weights: Float[Tensor, "B h T S"]
    entropy: Float[Tensor, "B h T"]


@torch.no_grad()
def weights_in_blocks(
    q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hkv S D"], rule: AttentionRule
) -> Iterator[HeadBlock]:
    """The exact weights of all heads, a few at a time: as many as stay in the cache of one core.

    A block holds at least the heads that share one key/value head. Its memory is used again for
    the next block.
    """
    dtype = q.dtype
    q, k, _ = in_double(q, k, k, rule)
    B, H, T, _ = q.shape
    Hkv, S = k.shape[1], k.shape[2]
    groups = H // Hkv
    step = max(1, CELL // max(1, B * groups * T * S))
    scratch = Scratch()
    for start in range(0, Hkv, step):
        kv_heads = slice(start, min(Hkv, start + step))
        heads = slice(kv_heads.start * groups, kv_heads.stop * groups)
        cell = Cell(slice(0, B), kv_heads, heads, Tile.whole(T, S, q.device))
        soft = powers_of_cell(q, k, rule, cell, scratch)
        weights = soft.powers.div_(soft.divisor)
        moment = soft.shifted.mul_(weights).sum(-1)
        divisor = soft.divisor[..., 0]
        nats = (torch.log2(divisor) * soft.kept / divisor - moment) * LN2
        named = {"weights": weights, "entropy": nats.clamp_(min=0.0)}
        yield HeadBlock(heads, **restore_dtype(named, dtype, rule))


def log_sum_exp(peak: Tensor, total: Tensor) -> Tensor:
    """In nats; −inf for a row that may attend to nothing, with a gradient of zero there."""
    empty = total == 0
    return torch.where(empty, -torch.inf, (peak + torch.log2(torch.where(empty, 1.0, total))) * LN2)


def _entropy(soft: Powers, weights: Tensor) -> Float[Tensor, "b h R"]:
    """In nats, over real keys."""
    # -Σ p log p = log Z Σ p - Σ p z; beside a sink Σ p of the real keys is kept / divisor, below 1.
    divisor = soft.divisor[..., 0]
    # A masked key has a weight of 0, and its logarithm times 0 must be a small number.
    moment = (soft.shifted.clamp(min=VANISHED) * weights).sum(-1)
    return ((torch.log2(divisor) * soft.kept / divisor - moment) * LN2).clamp(min=0.0)


def _all_keys(weights: Tensor, cell: Cell) -> Tensor:
    """Weights with zeros for the keys outside of the cell."""
    keys = cell.tile.keys
    return F.pad(weights, (keys.start, cell.tile.S - keys.stop))


def weights_from_lse(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    rule: AttentionRule,
    lse: Float[Tensor, "B H T"],
    wide: bool,
) -> Float[Tensor, "B H T S"]:
    """`exp(logits - lse)`, a cell at a time; zeros in a row without keys.

    It takes two thirds of the time of `attend_rows`, which finds each row's maximum first.

    Without gradients, for a rule without softcap. Half precisions are computed in float32,
    with the bias that the kernel added: in `wide` arithmetic as it is, else rounded.
    """
    shape, kind = (*q.shape[:3], k.shape[2]), torch.promote_types(q.dtype, torch.float32)
    # Zeros cost nothing where they are not touched: at keys that no row of a block sees.
    weights = torch.zeros(shape, dtype=kind, device=q.device)
    lse = torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1) * LOG2E
    scratch = Scratch()

    def compute(cell: Cell) -> Named:
        logits = base2_logits(q, k, rule, cell, scratch)
        bias = rule.bias_in(cell.tile, cell.texts, cell.heads)
        if bias is not None:
            logits.add_(bias if wide else bias.to(q.dtype), alpha=LOG2E)
        logits.sub_(lse[cell.texts, cell.heads, cell.rows]).exp2_()
        powers = scratch.hidden(rule, cell).fill(logits, 0.0)
        # Otherwise the rounding of `lse` would be the largest error of a weight.
        total = positive(powers.sum(-1, keepdim=True))
        torch.div(powers, total, out=weights[cell.texts, cell.heads, cell.rows, cell.keys])
        return {}

    over_cells(q, k, rule, compute)
    return weights
