"""Biases of the logits, by tile: stored as a tensor, or computed where a tile is needed."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._torch_private import can_read
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
