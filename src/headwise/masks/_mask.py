"""What every mask can be asked, and how masks combine."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.tiles import Tile


class Mask:
    """A rule that says for every query and key whether the query may attend to the key."""

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        """The rule on one rectangle of queries and keys."""
        raise NotImplementedError

    @property
    def batch(self) -> tuple[int, int]:
        """For how many texts and heads the rule is made; 1 is for all of them."""
        return 1, 1

    def extent(self, rows: range, T: int, S: int) -> range:
        """The keys outside of which these queries see nothing, without making a tensor."""
        return range(S)

    def shared(self, rows: range, T: int, S: int) -> range:
        """Keys that all these queries may attend to, as far as known without making a tensor."""
        return range(0)

    def simplify(self, T: int, S: int) -> "Mask | None":
        """The same rule for these lengths, without the parts that hide nothing; None: all do."""
        return self

    def texts(self) -> Int[Tensor, "#B S"] | None:
        """Which of the texts packed into a row each key belongs to, where the rule knows."""
        return None

    def reaches(self, marked: Bool[Tensor, "B H S"], T: int) -> Bool[Tensor, "B H #T"]:
        """Which queries may attend to one or more of the marked keys."""
        S = marked.shape[-1]
        visible = self.dense(T, S, marked.device).expand(-1, -1, -1, S)
        # As a matrix product, in which texts and heads that share a mask share its reading.
        axes = "".join(axis for axis, size in zip("bh", visible.shape, strict=False) if size > 1)
        shape = [size for size in visible.shape[:2] if size > 1] + list(visible.shape[2:])
        found = torch.einsum(f"{axes}ts,bhs->bht", visible.reshape(shape).float(), marked.float())
        return found > 0

    def dense(
        self, T: int, S: int, device: torch.device | str = "cpu"
    ) -> Bool[Tensor, "#B #H T S"]:
        """The whole rule as a tensor. It holds T·S entries: kernels ask for tiles instead."""
        return self.tile(Tile.whole(T, S, device))

    def __and__(self, other: "Mask") -> "Mask":
        return _And(self, _checked(other))

    def __or__(self, other: "Mask") -> "Mask":
        return _Or(self, _checked(other))

    # What is no mask stands on the left: `tensor & mask`.
    __rand__ = __and__
    __ror__ = __or__

    def __invert__(self) -> "Mask":
        return _Not(self)


def _checked(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    raise MaskError(
        f"masks: a mask combined with a {type(other).__name__}. "
        f"Give another mask: masks.as_mask(tensor) reads booleans, True = may attend."
    )


@dataclass(frozen=True)
class _And(Mask):
    left: Mask
    right: Mask

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        return self.left.tile(tile) & self.right.tile(tile)

    def texts(self) -> Int[Tensor, "#B S"] | None:
        told = self.left.texts()
        return self.right.texts() if told is None else told

    @property
    def batch(self) -> tuple[int, int]:
        return _broader(self.left, self.right)

    def simplify(self, T: int, S: int) -> Mask | None:
        one, two = self.left.simplify(T, S), self.right.simplify(T, S)
        if one is None or two is None:
            return two if one is None else one
        return one & two

    def extent(self, rows: range, T: int, S: int) -> range:
        return _both(self.left.extent(rows, T, S), self.right.extent(rows, T, S))

    def shared(self, rows: range, T: int, S: int) -> range:
        return _both(self.left.shared(rows, T, S), self.right.shared(rows, T, S))


@dataclass(frozen=True)
class _Or(Mask):
    left: Mask
    right: Mask

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        return self.left.tile(tile) | self.right.tile(tile)

    @property
    def batch(self) -> tuple[int, int]:
        return _broader(self.left, self.right)

    def extent(self, rows: range, T: int, S: int) -> range:
        one, two = self.left.extent(rows, T, S), self.right.extent(rows, T, S)
        return range(min(one.start, two.start), max(one.stop, two.stop))


@dataclass(frozen=True)
class _Not(Mask):
    inner: Mask

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        return ~self.inner.tile(tile)

    @property
    def batch(self) -> tuple[int, int]:
        return self.inner.batch


def _broader(one: Mask, two: Mask) -> tuple[int, int]:
    (texts, heads), (more_texts, more_heads) = one.batch, two.batch
    return max(texts, more_texts), max(heads, more_heads)


def _both(one: range, two: range) -> range:
    start = max(one.start, two.start)
    return range(start, max(start, min(one.stop, two.stop)))
