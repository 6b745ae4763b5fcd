"""What is added to the logits, a tile at a time: given whole, or made where it is needed."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.masks import Tile, can_look, cut


class Bias:
    """Finite numbers for queries and keys, that cost nothing until a tile of them is asked for."""

    def tile(self, tile: Tile) -> Float[Tensor, "#B #H #R #n"]:
        """The bias on one rectangle of queries and keys."""
        raise NotImplementedError

    @property
    def batch(self) -> tuple[int, int]:
        """For how many texts and heads the bias is made; 1 is for all of them."""
        raise NotImplementedError

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether no number is too large for a dtype; False where that cannot be looked up."""
        return True

    @property
    def parts(self) -> tuple["Bias", ...]:
        """What the bias is the sum of."""
        return (self,)

    @property
    def by_distance(self) -> bool:
        """Whether only the distance counts, on any plane whose last query is on the last key."""
        return False

    def __add__(self, other: "Bias") -> "Bias":
        return _Sum(self, other)


@dataclass(frozen=True)
class Given(Bias):
    """A tensor that was given whole; axes of one entry broadcast."""

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
        return can_look(self.values) and bool(self.values.detach().abs().amax() <= highest)


@dataclass(frozen=True)
class _Sum(Bias):
    one: Bias
    two: Bias

    def tile(self, tile: Tile) -> Float[Tensor, "#B #H #R #n"]:
        return self.one.tile(tile) + self.two.tile(tile)

    def fits(self, dtype: torch.dtype) -> bool:
        return self.one.fits(dtype) and self.two.fits(dtype)

    @property
    def parts(self) -> tuple[Bias, ...]:
        return self.one.parts + self.two.parts

    @property
    def batch(self) -> tuple[int, int]:
        (texts, heads), (more_texts, more_heads) = self.one.batch, self.two.batch
        return max(texts, more_texts), max(heads, more_heads)
