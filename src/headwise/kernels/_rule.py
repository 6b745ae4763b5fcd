"""The rule by which logits become weights: as it is written, and as the numbers kernels read."""

import math
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, and_
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise._display import type_of
from headwise._torch_private import can_read, statically
from headwise.errors import ArgumentError, MaskError, ShapeError
from headwise.masks import Mask, Window, as_mask, causal, documents, window
from headwise.masks.parts import Dense, MaskParts, a_tensor, split_additive
from headwise.masks.tiles import Tile, cut


class Bias:
    """Finite numbers for pairs of queries and keys; costs nothing until a tile is computed."""

    def tile(self, tile: Tile) -> Float[Tensor, "#B #H #R #n"]:
        """The bias on one rectangle of queries and keys."""
        raise NotImplementedError

    @property
    def batch(self) -> tuple[int, int]:
        """Number of texts and of heads that the bias is for; 1 broadcasts."""
        raise NotImplementedError

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether all values are in the range of a dtype; False where they cannot be read."""
        return True

    @property
    def parts(self) -> tuple["Bias", ...]:
        """The biases whose sum this one is."""
        return (self,)

    @property
    def by_distance(self) -> bool:
        """Whether the bias depends on the distance alone, with the last query at the last key."""
        return False

    def __add__(self, other: "Bias") -> "Bias":
        return _SumBias(self, other)


@dataclass(frozen=True)
class TensorBias(Bias):
    """A tensor of biases; axes of length 1 broadcast."""

    values: Float[Tensor, "#B #H #T #S"]

    def tile(self, tile: Tile) -> Float[Tensor, "#B #H #R #n"]:
        return cut(self.values, tile)

    @property
    def batch(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def fits(self, dtype: torch.dtype) -> bool:
        highest = torch.finfo(dtype).max
        if torch.finfo(self.values.dtype).max <= highest or not self.values.numel():
            return True
        return can_read(self.values) and bool(self.values.detach().abs().amax() <= highest)


@dataclass(frozen=True)
class _SumBias(Bias):
    left: Bias
    right: Bias

    def tile(self, tile: Tile) -> Float[Tensor, "#B #H #R #n"]:
        return self.left.tile(tile) + self.right.tile(tile)

    def fits(self, dtype: torch.dtype) -> bool:
        return self.left.fits(dtype) and self.right.fits(dtype)

    @property
    def parts(self) -> tuple[Bias, ...]:
        return self.left.parts + self.right.parts

    @property
    def batch(self) -> tuple[int, int]:
        (texts, heads), (more_texts, more_heads) = self.left.batch, self.right.batch
        return max(texts, more_texts), max(heads, more_heads)


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
            f"attend: bias is {type_of(bias)}. Give {a_tensor(bias)} of floats, which are "
            f"added to the logits."
        )
    is_float = isinstance(mask, Tensor) and mask.is_floating_point()
    is_boolean = isinstance(mask, Tensor) and mask.dtype == torch.bool
    if not (mask is None or isinstance(mask, Mask) or is_float or is_boolean):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(
            f"attend: a mask of {kind}. Give {a_tensor(mask)} of booleans (True = may attend) or "
            f"floats (added to the logits); masks.from_binary(mask) reads zeros and ones (1 = may "
            f"attend)."
        )
    masks: list[Mask] = [mask] if isinstance(mask, Mask) else []
    biases: list[Bias] = [bias] if isinstance(bias, Bias) else []
    if isinstance(mask, Tensor) and is_boolean:
        masks.append(as_mask(mask, "attend"))
    if is_causal:
        masks.append(causal())
    if near is not None:
        masks.append(window(near))
    for additive, binary in (mask if is_float else None, is_added), (bias, True):
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
