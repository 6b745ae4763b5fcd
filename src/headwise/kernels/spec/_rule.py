"""The rule by which logits become weights: all of an attention but queries, keys and values."""

import math
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, and_

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise._torch_private import can_read
from headwise.errors import ArgumentError, MaskError, ShapeError
from headwise.kernels.spec._bias import Bias, TensorBias
from headwise.masks import Mask, Window, as_mask, causal, window
from headwise.masks.parts import a_tensor, split_additive
from headwise.masks.tiles import Tile

MaskLike = Mask | Bool[Tensor, "*mask"] | Float[Tensor, "*mask"]
BiasLike = Bias | Float[Tensor, "*bias"]
# A logit of each head, or of each query.
Sinks = Float[Tensor, " H"] | Float[Tensor, "B H T"]
WindowLike = int | tuple[int | None, int | None]
# Beyond this scale float32 may neither tell logits apart nor hold them: they take float64.
LARGEST_SCALE = 1e10


@dataclass(frozen=True)
class AttentionRule:
    """Scale, then softcap, then bias and mask; sinks join the denominator.

    `visible` is None where every query may attend to every key. `bias` is finite: what an
    additive mask forbids has moved to `visible`.
    """

    scale: float
    visible: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None
    sinks: Sinks | None = None

    @property
    def needs_double(self) -> bool:
        """Whether logits are too large for float32."""
        return abs(self.scale) > LARGEST_SCALE

    @property
    def is_static(self) -> bool:
        """Whether it holds numbers only, so that equal rules stay equal."""
        if self.bias is not None or self.sinks is not None or type(self.scale) is not float:
            return False
        return self.visible is None or type(self.visible) is Window

    def simplify(self, T: int, S: int) -> "AttentionRule":
        """The same rule for these lengths, without masks that hide nothing."""
        visible = None if self.visible is None else self.visible.simplify(T, S)
        return self if visible is self.visible else replace(self, visible=visible)

    def visible_in(
        self, tile: Tile, texts: slice | None = None, heads: slice | None = None
    ) -> Bool[Tensor, "#B #H #R #n"] | None:
        """What may be attended to in a tile, for some texts and heads; None: everything."""
        return None if self.visible is None else _part(self.visible.tile(tile), texts, heads)

    def bias_in(
        self, tile: Tile, texts: slice | None = None, heads: slice | None = None
    ) -> Float[Tensor, "#B #H #R #n"] | None:
        """The bias of a tile, for some texts and heads."""
        return None if self.bias is None else _part(self.bias.tile(tile), texts, heads)

    def sample(self, T: int, S: int, device: torch.device | str = "cpu") -> list[Tensor]:
        """A 1×1 sample of its tensors, to inspect dtype and device."""
        parts = [self.sinks]
        if self.bias is not None or not isinstance(self.visible, Window | None):
            tile = Tile.sample(T, S, device)
            parts += self.visible_in(tile), self.bias_in(tile)
        return [x for x in parts if x is not None]

    def extent(self, rows: range, T: int, S: int) -> range:
        """The range of keys outside of which these queries see nothing."""
        return range(S) if self.visible is None else self.visible.extent(rows, T, S)


def make_rule(
    *,
    head_dim: int,
    mask: MaskLike | None = None,
    is_causal: bool = False,
    near: WindowLike | None = None,
    scale: float | None = None,
    bias: BiasLike | None = None,
    softcap: float | None = None,
    sinks: Sinks | None = None,
    is_added: bool = False,
) -> AttentionRule:
    """Gather the arguments of `attend` into one rule: masks into one mask, biases into one bias.

    Args:
        is_added: Whether a model adds its float mask to the logits, even one of zeros and ones.
    Raises:
        MaskError: a mask is neither boolean nor float, or holds only zeros and ones as floats.
    """
    if softcap is not None and not 0 < softcap < math.inf:
        raise ArgumentError(f"attend: softcap={softcap}. Give a positive number, or None.")
    if scale is not None and not math.isfinite(scale):
        raise ArgumentError(f"attend: scale={scale}. Give a finite number, or None.")
    if bias is not None and not isinstance(bias, Bias | Tensor):
        raise ArgumentError(
            f"attend: bias is a {type(bias).__name__}. Give {a_tensor(bias)} of floats, which are "
            f"added to the logits."
        )
    masks: list[Mask] = []
    biases: list[Bias] = [bias] if isinstance(bias, Bias) else []
    if is_causal:
        masks.append(causal())
    if near is not None:
        masks.append(window(near))
    for additive, binary in (_read_mask(mask, masks), is_added), (bias, True):
        if isinstance(additive, Tensor):
            visible, finite = split_additive(additive, "attend", allow_binary=binary)
            if visible is not None:
                masks.append(visible)
            if finite is not None:
                biases.append(TensorBias(finite))
    return AttentionRule(
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        visible=reduce(and_, masks) if masks else None,
        bias=reduce(add, biases) if biases else None,
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
    kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    if kind == torch.bool:
        masks.append(as_mask(mask, "attend"))
        return None
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        raise MaskError(
            f"attend: a mask of {kind}. Give {a_tensor(mask)} of booleans (True = may attend) or "
            f"floats (added to the logits); masks.from_binary(mask) reads zeros and ones (1 = may "
            f"attend)."
        )
    return mask


def check_rule(rule: AttentionRule, q: Tensor, k: Tensor) -> None:
    """Refuse what was made for another batch or another number of heads.

    Other lengths of tensors are refused where a tile is cut.
    """
    B, H, T, _ = q.shape
    if rule.visible is not None and not isinstance(rule.visible, Window):
        rule.visible.check_sizes(k.shape[2], B)
    for name, part in (("mask", rule.visible), ("bias", rule.bias)):
        if part is None:
            continue
        for made_for, size, things in zip(part.batch, (B, H), ("texts", "heads"), strict=True):
            if made_for not in (1, size):
                raise ShapeError(
                    f"attend: a {name} for {made_for} {things} where there are {size}. "
                    f"Give {size}, or 1 to broadcast."
                )
    if rule.sinks is not None:
        _check_sinks(rule.sinks, (B, H, T), q.device)


def _check_sinks(sinks: Tensor, shape: tuple[int, int, int], device: torch.device) -> None:
    H = shape[1]
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        kind = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ArgumentError(
            f"attend: sinks of {kind}. Give a tensor of {H} floats, one logit for each head."
        )
    if sinks.shape not in ((H,), shape):
        raise ShapeError(
            f"attend: sinks {tuple(sinks.shape)} for {H} heads. Give one logit for each head, or "
            f"for each query: [B, H, T]."
        )
    if sinks.device != device:
        raise ArgumentError(
            f"attend: sinks on {sinks.device}, queries on {device}. Bring them to one device."
        )
    if can_read(sinks) and not (highest := sinks.detach().amax().item()) < math.inf:
        raise ArgumentError(
            f"attend: sinks hold {highest}. Give finite numbers, or -inf for a head without."
        )


def _part(whole: Tensor, texts: slice | None, heads: slice | None) -> Tensor:
    """Some texts and heads of a tensor, whose axes of length 1 broadcast; None: all of them."""
    if texts is not None and whole.shape[0] > 1:
        whole = whole[texts]
    if heads is not None and whole.shape[1] > 1:
        whole = whole[:, heads]
    return whole
