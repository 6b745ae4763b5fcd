"""The interface of masks, and how they combine."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.tiles import Tile


class Mask:
    """A rule that decides for every query and key whether the query may attend to the key."""

    # An array beside a mask is refused as a whole, and not entry by entry.
    __array_ufunc__ = None

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        """The rule on one rectangle of queries and keys."""
        raise NotImplementedError

    @property
    def operands(self) -> "tuple[Mask, ...]":
        """The rules that this one combines."""
        return ()

    @property
    def batch(self) -> tuple[int, int]:
        """Number of texts and of heads that the rule is for; 1 broadcasts."""
        sizes = [(1, 1), *(operand.batch for operand in self.operands)]
        return max([texts for texts, _ in sizes]), max([heads for _, heads in sizes])

    def check_sizes(self, S: int, B: int | None = None) -> None:
        """Refuse a number of keys or of texts that the rule was not made for.

        Raises:
            ShapeError: a length is beyond the keys, or there is not one row for each text.
        """
        for operand in self.operands:
            operand.check_sizes(S, B)

    def extent(self, rows: range, T: int, S: int) -> range:
        """The range of keys that these queries may see, computed without a tensor."""
        return range(S)

    def shared(self, rows: range, T: int, S: int) -> range:
        """A range of keys that all these queries see, as far as it follows without a tensor."""
        return range(0)

    def simplify(self, T: int, S: int) -> "Mask | None":
        """The same rule without parts that mask nothing at these lengths; None if none is left."""
        return self

    def texts(self) -> Int[Tensor, "#B S"] | None:
        """The document of each key, where the rule separates texts packed into a row."""
        return None

    def reaches(self, marked: Bool[Tensor, "B H S"], T: int) -> Bool[Tensor, "B H #T"]:
        """Which queries may attend to at least one of the marked keys."""
        S = marked.shape[-1]
        visible = self.dense(T, S, marked.device).expand(-1, -1, -1, S)
        # As a matrix product, which reads a mask once for all texts and heads that share it.
        axes = "".join(axis for axis, size in zip("bh", visible.shape, strict=False) if size > 1)
        shape = [size for size in visible.shape[:2] if size > 1] + list(visible.shape[2:])
        counts = torch.einsum(f"{axes}ts,bhs->bht", visible.reshape(shape).float(), marked.float())
        return counts > 0

    def dense(
        self, T: int, S: int, device: torch.device | str = "cpu"
    ) -> Bool[Tensor, "#B #H T S"]:
        """The whole rule as a tensor of T·S entries, which kernels avoid by reading tiles."""
        self.check_sizes(S)
        return self.tile(Tile.whole(T, S, device))

    def __and__(self, other: "Mask") -> "Mask":
        return _And(self, _checked(other))

    def __or__(self, other: "Mask") -> "Mask":
        return _Or(self, _checked(other))

    # For a left operand that is no mask: `tensor & mask`.
    __rand__ = __and__
    __ror__ = __or__

    def __invert__(self) -> "Mask":
        return _Not(self)

    def __bool__(self) -> bool:
        # `causal() and padding(...)` would be the second alone, without an error.
        raise MaskError(
            "masks: a mask has no truth value, so that `and`, `or` and `not` cannot combine masks. "
            "Give first & second, first | second or ~mask; a test for None is `mask is None`."
        )


def _checked(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    raise MaskError(
        f"masks: a mask is combined with a value of type {type(other).__name__}. Give another "
        f"mask: masks.as_mask reads {a_tensor(other)} of booleans, True = may attend."
    )


def a_tensor(given: object) -> str:
    """What to give in place of something that is no tensor, for an error."""
    is_array = type(given).__module__ == "numpy"
    return "torch.from_numpy(array), a tensor" if is_array else "a tensor"


@dataclass(frozen=True)
class _And(Mask):
    left: Mask
    right: Mask

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        return self.left.tile(tile) & self.right.tile(tile)

    def texts(self) -> Int[Tensor, "#B S"] | None:
        ids = self.left.texts()
        return self.right.texts() if ids is None else ids

    @property
    def operands(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def simplify(self, T: int, S: int) -> Mask | None:
        left, right = self.left.simplify(T, S), self.right.simplify(T, S)
        if left is None or right is None:
            return right if left is None else left
        return left & right

    def extent(self, rows: range, T: int, S: int) -> range:
        return _overlap(self.left.extent(rows, T, S), self.right.extent(rows, T, S))

    def shared(self, rows: range, T: int, S: int) -> range:
        return _overlap(self.left.shared(rows, T, S), self.right.shared(rows, T, S))


@dataclass(frozen=True)
class _Or(Mask):
    left: Mask
    right: Mask

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        return self.left.tile(tile) | self.right.tile(tile)

    @property
    def operands(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def extent(self, rows: range, T: int, S: int) -> range:
        left, right = self.left.extent(rows, T, S), self.right.extent(rows, T, S)
        return range(min(left.start, right.start), max(left.stop, right.stop))


@dataclass(frozen=True)
class _Not(Mask):
    inner: Mask

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H R n"]:
        return ~self.inner.tile(tile)

    @property
    def operands(self) -> tuple[Mask, ...]:
        return (self.inner,)


def _overlap(left: range, right: range) -> range:
    start = max(left.start, right.start)
    return range(start, max(start, min(left.stop, right.stop)))
