"""Rules lowered to what kernels read: windows and lengths as numbers, the rest as arrays."""

from functools import reduce
from operator import add, and_
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise._torch_private import statically
from headwise.kernels.spec._bias import Bias, TensorBias
from headwise.kernels.spec._rule import AttentionRule
from headwise.masks import Mask, Window, documents
from headwise.masks.parts import Dense, MaskParts
from headwise.masks.tiles import Tile

# Largest mask or bias that is materialized for a kernel, in entries.
LARGEST_MATERIALIZED = 1 << 22
_EVERYWHERE = Window(None, None)
_CPU = torch.device("cpu")


class Lowered(NamedTuple):
    """A rule as numbers and tensors, in the order in which they are arguments of an operator.

    Query `i` of `T` is at key position `i + S - T`. Axes of length 1 broadcast. A key is visible
    if all fields allow it; None allows every key, and adds nothing.
    """

    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    left: int | None = None  # keys on each side of a query's own
    right: int | None = None
    key_range: Int[Tensor, "#B 2"] | None = None  # the first key, and one past the last
    documents: Int[Tensor, "#B S"] | None = None
    mask: Bool[Tensor, "#B #H #T #S"] | None = None
    bias: Float[Tensor, "#B #H #T #S"] | None = None
    by_distance: Float[Tensor, "#B #H n"] | None = None  # at S - 1 + i - j
    sinks: Float[Tensor, " H"] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self[4:] if x is not None]


def why_not_lowered(rule: AttentionRule, T: int, S: int) -> str | None:
    """Why a rule cannot be lowered; None if it can."""
    if rule.needs_double:
        return f"at scale={rule.scale:g} logits need float64, which is left to the rows"
    if rule.sinks is not None and rule.sinks.ndim > 1:
        return "sinks of each query are left to the rows"
    if rule.bias is None and (rule.visible is None or isinstance(rule.visible, Window)):
        return None
    parts = MaskParts.of(rule.visible, T, S)
    for name, part, is_dense in (
        ("mask", parts.rest, parts.is_dense),
        ("bias", *_dense_part(rule.bias)),
    ):
        if part is None or is_dense:
            continue
        texts, heads = part.batch
        if not statically(texts * heads * T * S <= LARGEST_MATERIALIZED):
            return (
                f"a {name} of {texts} x {heads} x {T} x {S} entries would have to be materialized"
            )
    return None


def _dense_part(bias: Bias | None) -> tuple[Bias | None, bool]:
    """The part of a bias that kernels read as an array, and whether it is one already."""
    parts = [part for part in bias.parts if not part.by_distance] if bias is not None else []
    if not parts:
        return None, False
    total = reduce(add, parts)
    return total, isinstance(total, TensorBias)


def lower(rule: AttentionRule, T: int, S: int, device: torch.device = _CPU) -> Lowered:
    """Lower a rule for these lengths, without reading tensor values."""
    visible_window = rule.visible if isinstance(rule.visible, Window) else _EVERYWHERE
    lowered = Lowered(
        rule.scale, rule.softcap or 0.0, visible_window.left, visible_window.right, sinks=rule.sinks
    )
    if rule.visible is not None and rule.visible is not visible_window:
        parts = MaskParts.of(rule.visible, T, S)
        lowered = lowered._replace(
            left=parts.window.left,
            right=parts.window.right,
            key_range=parts.key_range,
            documents=parts.documents,
            mask=parts.dense(T, S, device),
        )
    if rule.bias is None:
        return lowered
    tables = [_table(part, T, S, device) for part in rule.bias.parts if part.by_distance]
    dense, _ = _dense_part(rule.bias)
    return lowered._replace(
        bias=None if dense is None else dense.tile(Tile.whole(T, S, device)),
        by_distance=sum(tables[1:], tables[0]) if tables else None,
    )


def _table(bias: Bias, T: int, S: int, device: torch.device) -> Float[Tensor, "#B #H n"]:
    """A bias by distance alone: entry `S - 1 + i - j` is that of query `i` and key `j`."""
    n = T + S - 1
    line = bias.tile(Tile(n, n, slice(S - 1, S), slice(0, n), device))
    return line[:, :, 0].flip(-1)


def rule_from_lowered(lowered: Lowered, T: int, S: int) -> AttentionRule:
    """The rule that was lowered to this, for kernels that do not read the lowered form."""
    masks: list[Mask] = [Window(lowered.left, lowered.right)]
    positions = torch.arange(S)
    if lowered.key_range is not None:
        start, stop = lowered.key_range[:, :1], lowered.key_range[:, 1:]
        masks.append(Dense(((positions >= start) & (positions < stop))[:, None, None]))
    if lowered.documents is not None:
        masks.append(documents(lowered.documents))
    if lowered.mask is not None:
        masks.append(Dense(lowered.mask))
    biases: list[Bias] = [] if lowered.bias is None else [TensorBias(lowered.bias)]
    if lowered.by_distance is not None:
        distance = torch.arange(T)[:, None] - positions + S - 1  # T S
        biases.append(TensorBias(lowered.by_distance[..., distance]))
    return AttentionRule(
        scale=lowered.scale,
        visible=reduce(and_, masks).simplify(T, S),
        bias=reduce(add, biases) if biases else None,
        softcap=lowered.softcap or None,
        sinks=lowered.sinks,
    )
