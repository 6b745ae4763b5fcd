"""Masks that follow from positions, lengths or documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from headwise._display import counted
from headwise._torch_private import can_read, statically
from headwise.errors import ArgumentError, ShapeError
from headwise.masks._mask import Mask
from headwise.masks.tiles import Tile


def causal() -> Mask:
    """A query sees its own position and what comes before."""
    return Window(None, 0)


def window(size: int | tuple[int | None, int | None]) -> Mask:
    """A query sees its neighbors: `(left, right)` keys on each side besides its own position.

    A single number is the same on both sides; None is no limit on that side. Hugging Face's
    `sliding_window=W` counts the query itself and is `causal() & window((W - 1, 0))`.

    Raises:
        ArgumentError: it is neither a number nor two, or a side is negative.
    """
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) != 2 or not all(side is None or _is_count(side) for side in sides):
        raise ArgumentError(
            f"window: {sides} is not (left, right). "
            f"Give the number of keys visible on each side, 0 or more, or None for no limit."
        )
    return Window(*sides)


def _is_count(n: object) -> bool:
    return isinstance(n, Integral | torch.SymInt) and bool(n >= 0)  # type: ignore[operator]


def padding(
    lengths: Sequence[int] | Int[Tensor, " B"], side: Literal["left", "right"] = "right"
) -> Mask:
    """Only the real keys of each text are visible: the first `lengths[b]`, or the last ones.

    It is for a batch of as many texts as there are lengths. A length beyond the keys is refused
    where it can be read: not on a GPU, nor while being traced.

    Args:
        lengths: The number of real keys of each text.
        side: The side of the padding.
    Raises:
        ArgumentError: a length is negative or no whole number, or `side` is neither "left" nor
            "right".
    """
    advice = "Give one whole number of real keys for each text."
    counts = _as_tensor(lengths, "padding: lengths", advice)
    if side not in ("left", "right"):
        raise ArgumentError(f"padding: side={side!r}. Say 'left' or 'right'.")
    whole = not counts.is_floating_point() and counts.dtype != torch.bool
    if counts.ndim != 1 or not whole or (can_read(counts) and bool((counts < 0).any())):
        raise ArgumentError(f"padding: lengths {counts.tolist()}. {advice}")
    return _Padding(counts, side)


def documents(ids: Int[Tensor, "B S"] | Sequence[Sequence[int]]) -> Mask:
    """Separate texts packed into one row: a query sees the keys of its own document.

    Args:
        ids: For each key the number of its document; queries are the last `T` of them. There can
            be no more queries than keys.
    Raises:
        ArgumentError: they are not numbers, or their rows have different lengths.
        ShapeError: they are not a row for each text.
    """
    advice = "Give [batch, keys]: a row of numbers for each text."
    ids = _as_tensor(ids, "documents: ids", advice)
    if ids.ndim != 2:
        raise ShapeError(f"documents: ids of shape {tuple(ids.shape)}. {advice}")
    return _Documents(ids)


def _as_tensor(values: Any, argument: str, advice: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError) as error:  # words, rows of different lengths
        raise ArgumentError(f"{argument} {values!r:.40}. {advice}") from error


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

    def __and__(self, other: Mask) -> Mask:
        return self.nearer(other) if isinstance(other, Window) else super().__and__(other)

    def nearer(self, other: "Window") -> "Window":
        """The window that both allow."""
        return Window(_nearer(self.left, other.left), _nearer(self.right, other.right))

    def simplify(self, T: int, S: int) -> Mask | None:
        # The last query is at the last key, the first one T - 1 keys before it.
        left = None if self.left is None or statically(self.left >= S - 1) else self.left
        right = None if self.right is None or statically(self.right >= T - 1) else self.right
        if left is None and right is None:
            return None
        return self if (left, right) == (self.left, self.right) else Window(left, right)

    def reaches(self, marked: Bool[Tensor, "B H S"], T: int) -> Bool[Tensor, "B H T"]:
        S = marked.shape[-1]
        before = F.pad(marked.cumsum(-1), (1, 0))  # marked keys before each key, and before S
        positions = torch.arange(S - T, S, device=marked.device)
        start = (
            torch.zeros_like(positions)
            if self.left is None
            else (positions - self.left).clamp(0, S)
        )
        stop = (
            torch.full_like(positions, S)
            if self.right is None
            else (positions + 1 + self.right).clamp(0, S)
        )
        return before[..., stop] > before[..., start]

    def extent(self, rows: range, T: int, S: int) -> range:
        shift = S - T
        start = 0 if self.left is None else max(0, rows.start + shift - self.left)
        stop = S if self.right is None else min(S, rows.stop + shift + self.right)
        return range(start, max(start, stop))

    def shared(self, rows: range, T: int, S: int) -> range:
        if not len(rows):
            return range(S)
        first, last = rows.start + S - T, rows.stop - 1 + S - T
        start = 0 if self.left is None else max(0, last - self.left)
        stop = S if self.right is None else max(0, min(S, first + 1 + self.right))
        return range(start, max(start, stop))


def _nearer(left: int | None, right: int | None) -> int | None:
    limits = [limit for limit in (left, right) if limit is not None]
    return min(limits, default=None)


@dataclass(frozen=True)
class _Padding(Mask):
    lengths: Int[Tensor, " B"]
    side: str

    def tile(self, tile: Tile) -> Bool[Tensor, "B 1 1 n"]:
        lengths = self.lengths.to(tile.device)[:, None]
        from_edge = tile.key_at if self.side == "right" else tile.S - 1 - tile.key_at
        return (from_edge < lengths)[:, None, None]

    @property
    def batch(self) -> tuple[int, int]:
        return self.lengths.shape[0], 1

    def check_sizes(self, S: int, B: int | None = None) -> None:
        _check_texts("padding", "length", self.lengths, B)
        if can_read(self.lengths) and bool((self.lengths > S).any()):
            raise ShapeError(
                f"padding: lengths {self.lengths.tolist()} of {S} keys. Give the number of real "
                f"keys of each text, {S} at most."
            )


@dataclass(frozen=True)
class _Documents(Mask):
    ids: Int[Tensor, "B S"]

    def texts(self) -> Int[Tensor, "#B S"]:
        return self.ids

    def tile(self, tile: Tile) -> Bool[Tensor, "B 1 R n"]:
        if self.ids.shape[-1] != tile.S:
            raise ShapeError(
                f"documents: {self.ids.shape[-1]} ids for {tile.S} keys. Give one id for each key."
            )
        if statically(tile.T > tile.S):
            raise ShapeError(
                f"documents: {tile.T} queries and {tile.S} keys. The queries of packed texts are "
                f"among their keys, so give no more queries than keys."
            )
        ids = self.ids.to(tile.device)
        shift = tile.S - tile.T
        queries = ids[:, tile.rows.start + shift : tile.rows.stop + shift]
        return (queries[:, :, None] == ids[:, None, tile.keys.start : tile.keys.stop])[:, None]

    @property
    def batch(self) -> tuple[int, int]:
        return self.ids.shape[0], 1

    def check_sizes(self, S: int, B: int | None = None) -> None:
        _check_texts("documents", "row", self.ids, B)


def _check_texts(rule: str, kind: str, values: Tensor, B: int | None) -> None:
    if B is not None and values.shape[0] != B:
        raise ShapeError(
            f"{rule}: {counted(values.shape[0], kind)} for {counted(B, 'text')}. Give one for each "
            f"text of the batch."
        )
