"""Positions: rotations of queries and keys (RoPE), and biases on the logits (ALiBi).

The product of a rotated query and key depends only on the distance between their positions.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError
from headwise.kernels import Bias
from headwise.masks.tiles import Tile
from headwise.shapes import is_size

Positions = Int[Tensor, " T"]
# The cosines and sines of a rotation, per position and feature. A rotated feature is
# `x · cos + partner · sin`, where `partner` is the other feature of its pair: the sine is negative
# for the first feature of a pair and positive for the second.
CosSin = tuple[Float[Tensor, "T width"], Float[Tensor, "T width"]]


@dataclass(frozen=True)
class RoPE:
    """Rotate pairs of features of queries and keys by angles proportional to the position.

    Feature `i` is paired with `i + width / 2`, as in Llama and GPT-NeoX.

    Args:
        width: How many leading features of a head are rotated. The others stay unchanged.
        base: The lowest frequency is about `base` times lower than the highest.
    Raises:
        ShapeError: `width` is odd or not positive.
        ArgumentError: `base` is not above 1.
    Source:
        Su et al. 2021, eq. 15 and 34 (arXiv:2104.09864).
    """

    width: int
    base: float = 10_000.0

    def __post_init__(self) -> None:
        if not is_size(self.width) or self.width % 2:
            raise ShapeError(
                f"RoPE: width={self.width!r}. Features rotate in pairs: "
                f"give a positive even number."
            )
        if not 1 < self.base < math.inf:
            raise ArgumentError(f"RoPE: base={self.base}. Give a number above 1.")

    def cos_sin(self, positions: Positions, dtype: torch.dtype) -> CosSin:
        """The cosines and sines of these positions, for queries and keys of this dtype."""
        # Not a buffer: `layer.bfloat16()` would round it, which distorts far positions.
        work = torch.promote_types(dtype, torch.float32)
        pairs = torch.arange(0, self.width, 2, dtype=work, device=positions.device) / self.width
        angles = positions.to(work)[:, None] * self.base**-pairs  # T pairs
        cos, sin = angles.cos(), angles.sin()
        # The rotation itself runs in the dtype of queries and keys: in half precision that is
        # faster than float32 with its casts, and as exact as their own rounding.
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def rotate(self, x: Float[Tensor, "B H T D"], cos_sin: CosSin) -> Float[Tensor, "B H T D"]:
        """Rotate queries or keys by the cosines and sines of their positions."""
        features, unrotated = x[..., : self.width], x[..., self.width :]
        first, second = features.chunk(2, dim=-1)
        cos, sin = cos_sin
        rotated = torch.addcmul(features * cos, torch.cat((second, first), -1), sin)
        return torch.cat((rotated, unrotated), dim=-1) if unrotated.shape[-1] else rotated


@dataclass(frozen=True)
class ALiBi:
    """A penalty proportional to the distance, with one slope per head.

    Raises:
        ArgumentError: `n_heads` is not positive.
    Source:
        Press et al. 2022 (arXiv:2108.12409), with their slopes for any number of heads.
    """

    n_heads: int

    def __post_init__(self) -> None:
        if not is_size(self.n_heads):
            raise ArgumentError(f"ALiBi: n_heads={self.n_heads!r}. Give a positive whole number.")

    def slopes(self) -> tuple[float, ...]:
        """The penalty of each head for one token of distance."""
        whole = 2 ** math.floor(math.log2(self.n_heads))
        slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
        between = [2 ** (-4 * (2 * head + 1) / whole) for head in range(self.n_heads - whole)]
        return (*slopes, *between)

    def bias(self, dtype: torch.dtype) -> Bias:
        """The bias for queries and keys of this dtype."""
        return _Slopes(self.slopes(), torch.promote_types(dtype, torch.float32))


@dataclass(frozen=True)
class _Slopes(Bias):
    """The bias of ALiBi, computed one tile at a time."""

    slopes: tuple[float, ...]
    dtype: torch.dtype

    @property
    def batch(self) -> tuple[int, int]:
        return 1, len(self.slopes)

    @property
    def by_distance(self) -> bool:
        return True

    def tile(self, tile: Tile) -> Float[Tensor, "1 H R n"]:
        slopes = torch.tensor(self.slopes, dtype=self.dtype, device=tile.device)
        distance = (tile.key_at - tile.query_at).abs().to(self.dtype)
        return (-slopes[:, None, None] * distance)[None]
