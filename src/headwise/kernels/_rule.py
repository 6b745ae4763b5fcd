"""How logits become weights: everything about an attention but its queries, keys and values."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.errors import ArgumentError, MaskError, ShapeError
from headwise.masks import Dense, Mask, Tile, as_mask, causal, split_additive, window

MaskLike = Mask | Bool[Tensor, "*shape"] | Float[Tensor, "*shape"]
WindowLike = int | tuple[int | None, int | None]


@dataclass(frozen=True)
class Rule:
    """Scale, then softcap, then bias and mask; sinks join the denominator.

    `visible` is None where every query may attend to every key. `bias` is finite: what an
    additive mask forbids has moved to `visible`.
    """

    scale: float
    visible: Mask | None = None
    bias: Float[Tensor, "#B #H T S"] | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " H"] | None = None

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"] | None:
        return None if self.visible is None else self.visible.tile(tile)

    def extent(self, rows: range, T: int, S: int) -> range:
        """The keys outside of which these queries see nothing."""
        return range(S) if self.visible is None else self.visible.extent(rows, T, S)


def make_rule(
    *,
    head_dim: int,
    mask: MaskLike | None = None,
    is_causal: bool = False,
    near: WindowLike | None = None,
    scale: float | None = None,
    bias: Float[Tensor, "*shape"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> Rule:
    """Gather the arguments of `attend` into one rule: masks into one mask, biases into one bias."""
    if softcap is not None and softcap <= 0:
        raise ArgumentError(f"attend: softcap={softcap}. Give a positive number, or None.")
    masks: list[Mask] = []
    biases: list[Tensor] = []
    if is_causal:
        masks.append(causal())
    if near is not None:
        masks.append(window(near))
    for additive in _read_mask(mask, masks), bias:
        if additive is not None:
            visible, finite = split_additive(additive, "attend")
            if not bool(visible.all()):
                masks.append(Dense(visible))
            if finite is not None:
                biases.append(finite)
    return Rule(
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        visible=_all_of(masks),
        bias=sum(biases[1:], start=biases[0]) if biases else None,
        softcap=softcap,
        sinks=sinks,
    )


def _read_mask(mask: MaskLike | None, masks: list[Mask]) -> Tensor | None:
    """Put a lazy or boolean mask among `masks`; hand an additive one back."""
    if mask is None:
        return None
    if isinstance(mask, Mask):
        masks.append(mask)
        return None
    if mask.dtype == torch.bool:
        masks.append(as_mask(mask, "attend"))
        return None
    if not mask.is_floating_point():
        raise MaskError(
            f"attend: a mask of dtype {mask.dtype}. "
            f"Give booleans (True = may attend) or floats (added to the logits)."
        )
    return mask


def _all_of(masks: list[Mask]) -> Mask | None:
    if not masks:
        return None
    combined = masks[0]
    for mask in masks[1:]:
        combined = combined & mask
    return combined


def check_tile(visible: Tensor, B: int, H: int) -> None:
    """Refuse a mask made for another batch or another number of heads."""
    for axis, size, name in ((0, B, "texts"), (1, H, "heads")):
        if visible.shape[axis] not in (1, size):
            raise ShapeError(
                f"attend: a mask for {visible.shape[axis]} {name} where there are {size} "
                f"(mask {tuple(visible.shape)}). Give {size}, or 1 to broadcast."
            )
