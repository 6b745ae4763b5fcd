"""Which queries may attend to which keys, as a rule that costs nothing until it is used.

True = may attend, everywhere. Masks combine with `&`, `|` and `~`. Queries stand at the end
of the keys: query `i` of `T` is at key position `i + S - T`, so a causal mask with `T < S` is
aligned bottom-right and the last query sees the last key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from headwise.errors import ArgumentError, MaskError, ShapeError

__all__ = [
    "Mask",
    "Tile",
    "as_mask",
    "causal",
    "cut",
    "documents",
    "from_additive",
    "from_blocked",
    "padding",
    "window",
]


@dataclass(frozen=True)
class Tile:
    """A rectangle of the `T` x `S` plane: queries `rows` against keys `keys`."""

    T: int
    S: int
    rows: range
    keys: range
    device: torch.device

    @classmethod
    def whole(cls, T: int, S: int, device: torch.device | str = "cpu") -> "Tile":
        return cls(T, S, range(T), range(S), torch.device(device))

    @property
    def query_at(self) -> Int[Tensor, "R 1"]:
        """Where each query stands among the keys."""
        shift = self.S - self.T
        return torch.arange(
            self.rows.start + shift, self.rows.stop + shift, device=self.device
        ).unsqueeze(-1)

    @property
    def key_at(self) -> Int[Tensor, " n"]:
        return torch.arange(self.keys.start, self.keys.stop, device=self.device)


class Mask:
    """A rule that says for every query and key whether the query may attend to the key."""

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        """The rule on one rectangle of queries and keys."""
        raise NotImplementedError

    def extent(self, rows: range, T: int, S: int) -> range:
        """The keys outside of which these queries see nothing, without making a tensor."""
        return range(S)

    def dense(
        self, T: int, S: int, device: torch.device | str = "cpu"
    ) -> Bool[Tensor, "#B #H T S"]:
        """The whole rule as a tensor. It holds T·S entries: kernels ask for tiles instead."""
        return self.tile(Tile.whole(T, S, device))

    def __and__(self, other: "Mask") -> "Mask":
        return _And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _Or(self, other)

    def __invert__(self) -> "Mask":
        return _Not(self)


def causal() -> Mask:
    """A query sees its own position and what comes before."""
    return Window(None, 0)


def window(size: int | tuple[int | None, int | None]) -> Mask:
    """A query sees its neighbors: `(left, right)` keys on each side besides its own position.

    A single number is the same on both sides; None is no limit on that side. Hugging Face's
    `sliding_window=W` counts the query itself and is `causal() & window((W - 1, 0))`.

    Raises:
        ArgumentError: a side is negative.
    """
    left, right = size if isinstance(size, tuple) else (size, size)
    for side in (left, right):
        if side is not None and side < 0:
            raise ArgumentError(
                f"window: ({left}, {right}) has a negative side. "
                f"Give the number of keys visible on each side, or None for no limit."
            )
    return Window(left, right)


def padding(
    lengths: Sequence[int] | Int[Tensor, " B"], side: Literal["left", "right"] = "right"
) -> Mask:
    """Only the real keys of each text are seen: the first `lengths[b]`, or the last of them.

    Args:
        lengths: The number of real keys of each text.
        side: Where the padding stands.
    Raises:
        ArgumentError: a length is negative, or `side` is neither "left" nor "right".
    """
    counts = torch.as_tensor(lengths)
    if side not in ("left", "right"):
        raise ArgumentError(f"padding: side={side!r}. Say 'left' or 'right'.")
    if counts.ndim != 1 or bool((counts < 0).any()):
        raise ArgumentError(
            f"padding: lengths {counts.tolist()}. Give one number of real keys for each text."
        )
    return _Padding(counts, side)


def documents(ids: Int[Tensor, "B S"]) -> Mask:
    """Texts packed into one row are kept apart: a query sees the keys of its own document.

    Args:
        ids: For each key the number of its document; queries are the last `T` of them.
    """
    return _Documents(ids)


def from_blocked(blocked: Bool[Tensor, "*shape"]) -> Mask:
    """Read a mask of the other polarity (True = blocked, as in `nn.MultiheadAttention`).

    Raises:
        MaskError: the mask is not boolean.
        ShapeError: it is neither `[T, S]` nor `[B, H, T, S]`.
    """
    if blocked.dtype != torch.bool:
        raise MaskError(
            f"from_blocked: dtype {blocked.dtype}. Give booleans, True where a key is blocked."
        )
    return Dense(_four(~blocked, "from_blocked"))


def from_additive(additive: Float[Tensor, "*shape"]) -> Mask:
    """Read a mask of zeros and minus infinities, as is added to logits.

    The most negative number of the dtype counts as minus infinity (Hugging Face writes it).

    Raises:
        MaskError: the mask is not of floats, or has other entries: those are a bias.
        ShapeError: it is neither `[T, S]` nor `[B, H, T, S]`.
    """
    visible, bias = split_additive(additive, "from_additive")
    if bias is not None:
        raise MaskError(
            f"from_additive: entries between {bias.min().item():g} and {bias.max().item():g} "
            f"are a bias, not a mask. Give them as attend(bias=...)."
        )
    return Dense(visible)


def as_mask(visible: Bool[Tensor, "*shape"], where: str = "mask") -> Mask:
    """Read booleans, True = may attend: `[T, S]`, or `[B, H, T, S]` with ones to broadcast."""
    return Dense(_four(visible, where))


def split_additive(
    additive: Float[Tensor, "*shape"], where: str
) -> tuple[Bool[Tensor, "#B #H T S"], Float[Tensor, "#B #H T S"] | None]:
    """Part an additive mask into what may be attended to and the finite bias that remains.

    The bias is None when nothing but zeros and minus infinities was there.
    """
    if not additive.is_floating_point():
        raise MaskError(
            f"{where}: dtype {additive.dtype}. "
            f"Give booleans (True = may attend) or floats (added to the logits)."
        )
    four = _four(additive, where)
    visible = four > torch.finfo(four.dtype).min
    bias = four.masked_fill(~visible, 0.0)
    if not bool(bias.detach().any()):
        return visible, None
    return visible, bias


def cut(whole: Shaped[Tensor, "#B #H #T #S"], tile: Tile) -> Shaped[Tensor, "#B #H #R #n"]:
    """The part of a tensor over queries and keys that lies in a tile; axes of one broadcast."""
    for axis, size, name in ((2, tile.T, "queries"), (3, tile.S, "keys")):
        if whole.shape[axis] not in (1, size):
            raise ShapeError(
                f"mask or bias: shape {tuple(whole.shape)} does not fit {size} {name}. "
                f"Give [..., {tile.T}, {tile.S}], or ones to broadcast."
            )
    part = whole.to(tile.device)
    if part.shape[2] > 1:
        part = part[:, :, tile.rows.start : tile.rows.stop]
    if part.shape[3] > 1:
        part = part[..., tile.keys.start : tile.keys.stop]
    return part


def _four(mask: Tensor, where: str) -> Tensor:
    if mask.ndim == 2:
        return mask[None, None]
    if mask.ndim != 4:
        raise ShapeError(
            f"{where}: a mask of shape {tuple(mask.shape)}. "
            f"Give [T, S] or [B, H, T, S], with 1 for B or H to broadcast."
        )
    return mask


@dataclass(frozen=True)
class Window(Mask):
    """`left` and `right` keys beside the query's own position; None for no limit."""

    left: int | None
    right: int | None

    def tile(self, tile: Tile) -> Bool[Tensor, "1 1 R n"]:
        ahead = tile.key_at - tile.query_at
        visible = torch.ones_like(ahead, dtype=torch.bool)
        if self.right is not None:
            visible &= ahead <= self.right
        if self.left is not None:
            visible &= ahead >= -self.left
        return visible[None, None]

    def extent(self, rows: range, T: int, S: int) -> range:
        shift = S - T
        start = 0 if self.left is None else max(0, rows.start + shift - self.left)
        stop = S if self.right is None else min(S, rows.stop + shift + self.right)
        return range(start, max(start, stop))


@dataclass(frozen=True)
class _Padding(Mask):
    lengths: Int[Tensor, " B"]
    side: str

    def tile(self, tile: Tile) -> Bool[Tensor, "B 1 1 n"]:
        lengths = self.lengths.to(tile.device)[:, None]
        from_edge = tile.key_at if self.side == "right" else tile.S - 1 - tile.key_at
        return (from_edge < lengths)[:, None, None]


@dataclass(frozen=True)
class _Documents(Mask):
    ids: Int[Tensor, "B S"]

    def tile(self, tile: Tile) -> Bool[Tensor, "B 1 R n"]:
        if self.ids.shape[-1] != tile.S:
            raise ShapeError(
                f"documents: {self.ids.shape[-1]} ids for {tile.S} keys. Give one id for each key."
            )
        ids = self.ids.to(tile.device)
        shift = tile.S - tile.T
        queries = ids[:, tile.rows.start + shift : tile.rows.stop + shift]
        return (queries[:, :, None] == ids[:, None, tile.keys.start : tile.keys.stop])[:, None]


@dataclass(frozen=True)
class Dense(Mask):
    """A boolean tensor that was given whole; axes of one entry broadcast."""

    visible: Bool[Tensor, "#B #H #T #S"]

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H #R #n"]:
        return cut(self.visible, tile)


@dataclass(frozen=True)
class _And(Mask):
    left: Mask
    right: Mask

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        return self.left.tile(tile) & self.right.tile(tile)

    def extent(self, rows: range, T: int, S: int) -> range:
        one, two = self.left.extent(rows, T, S), self.right.extent(rows, T, S)
        start = max(one.start, two.start)
        return range(start, max(start, min(one.stop, two.stop)))


@dataclass(frozen=True)
class _Or(Mask):
    left: Mask
    right: Mask

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        return self.left.tile(tile) | self.right.tile(tile)

    def extent(self, rows: range, T: int, S: int) -> range:
        one, two = self.left.extent(rows, T, S), self.right.extent(rows, T, S)
        return range(min(one.start, two.start), max(one.stop, two.stop))


@dataclass(frozen=True)
class _Not(Mask):
    inner: Mask

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        return ~self.inner.tile(tile)
