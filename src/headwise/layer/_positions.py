"""Positions: rotations of queries and keys (RoPE), and biases on the logits (ALiBi).

The product of a rotated query and key depends only on the distance between their positions.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError
from headwise.kernels import Bias
from headwise.masks.tiles import Tile
from headwise.shapes import is_size

# One row per text, or a single row for all texts.
Positions = Int[Tensor, "b T"]
Keys = Int[Tensor, "b S"]
# The cosines and sines of a rotation, per position and feature. A rotated feature is
# `x · cos + partner · sin`, where `partner` is the other feature of its pair: the sine is negative
# for the first feature of a pair and positive for the second.
CosSin = tuple[Float[Tensor, "b 1 T width"], Float[Tensor, "b 1 T width"]]


@dataclass(frozen=True)
class RoPE:
    """Rotate pairs of features of queries and keys by angles proportional to the position.

    Args:
        width: How many leading features of a head are rotated. The others stay unchanged.
        base: The lowest frequency is about `base` times lower than the highest.
        pairing: "half" pairs feature `i` with `i + width / 2` (Llama, GPT-NeoX),
            "interleaved" `2i` with `2i + 1` (RoFormer, GPT-J).
    Raises:
        ShapeError: `width` is odd or not positive.
        ArgumentError: `base` is not above 1, or the pairing is unknown.
    Source:
        Su et al. 2021, eq. 15 and 34 (arXiv:2104.09864).
    """

    width: int
    base: float = 10_000.0
    pairing: Literal["half", "interleaved"] = "half"

    def __post_init__(self) -> None:
        if not is_size(self.width) or self.width % 2:
            raise ShapeError(
                f"RoPE: width={self.width!r}. Features rotate in pairs: "
                f"give a positive even number."
            )
        if not 1 < self.base < math.inf:
            raise ArgumentError(f"RoPE: base={self.base}. Give a number above 1.")
        if self.pairing not in ("half", "interleaved"):
            raise ArgumentError(f"RoPE: pairing={self.pairing!r}. Say 'half' or 'interleaved'.")

    def frequencies(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Float[Tensor, " pairs"]:
        """The angle between neighboring positions for each pair, in radians."""
        pairs = torch.arange(0, self.width, 2, dtype=dtype, device=device) / self.width
        return self.base**-pairs

    def rotate(self, x: Float[Tensor, "B H T D"], positions: Positions) -> Float[Tensor, "B H T D"]:
        """Rotate queries or keys by the angles of their positions."""
        return self.rotate_by(x, self.cos_sin(positions, x.dtype))

    def cos_sin(self, positions: Positions, dtype: torch.dtype) -> CosSin:
        """The cosines and sines of these positions, for queries and keys of this dtype."""
        # Not a buffer: `layer.bfloat16()` would round it, which distorts far positions.
        work = torch.promote_types(dtype, torch.float32)
        frequencies = self.frequencies(work, positions.device)
        angles = positions.to(work)[:, None, :, None] * frequencies  # b 1 T pairs
        cos, sin = angles.cos(), angles.sin()
        # The rotation itself runs in the dtype of queries and keys: in half precision that is
        # faster than float32 with its casts, and as exact as their own rounding.
        return self._join_pairs(cos, cos).to(dtype), self._join_pairs(-sin, sin).to(dtype)

    def rotate_by(self, x: Float[Tensor, "B H T D"], cos_sin: CosSin) -> Float[Tensor, "B H T D"]:
        """Rotate queries or keys by precomputed cosines and sines."""
        features, unrotated = x[..., : self.width], x[..., self.width :]
        if self.pairing == "half":
            first, second = features.chunk(2, dim=-1)
        else:
            first, second = features[..., 0::2], features[..., 1::2]
        partners = self._join_pairs(second, first)
        cos, sin = cos_sin
        rotated = torch.addcmul(features * cos, partners, sin)
        return torch.cat((rotated, unrotated), dim=-1) if unrotated.shape[-1] else rotated

    def _join_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Put the first and the second feature of each pair at their places in the head."""
        if self.pairing == "half":
            return torch.cat((first, second), dim=-1)
        return torch.stack((first, second), dim=-1).flatten(-2)


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

    def of_distance(
        self, ahead: Int[Tensor, "*shape"], dtype: torch.dtype
    ) -> Float[Tensor, " H *shape"]:
        """The bias of keys `ahead` tokens after their queries, one per head."""
        work = torch.promote_types(dtype, torch.float32)
        slopes = torch.tensor(self.slopes(), dtype=work, device=ahead.device)
        return -slopes.view(-1, *[1] * ahead.ndim) * ahead.abs().to(work)


@dataclass(frozen=True)
class PositionedBias(Bias):
    """ALiBi at given query and key positions, computed one tile at a time.

    Where positions are consecutive, the bias is constant along each diagonal, so it is computed
    once per distance and not for every pair.
    """

    part: ALiBi
    query_at: Positions
    key_at: Keys
    dtype: torch.dtype
    in_steps: bool  # whether positions are consecutive and the last query is the last key

    @property
    def batch(self) -> tuple[int, int]:
        return max(len(self.query_at), len(self.key_at)), self.part.n_heads

    @property
    def by_distance(self) -> bool:
        return self.in_steps

    def tile(self, tile: Tile) -> Float[Tensor, "b H R n"]:
        rows, keys = tile.rows, tile.keys
        if not self.in_steps:
            query_at = self.query_at[:, rows.start : rows.stop, None]
            ahead = self.key_at[:, None, keys.start : keys.stop] - query_at
            return self.part.of_distance(ahead, self.dtype).transpose(0, 1)
        # A traced graph has no strided views of symbolic length.
        if torch.compiler.is_compiling():
            return self.part.of_distance(tile.key_at - tile.query_at, self.dtype)[None]
        n_rows, n_keys = rows.stop - rows.start, keys.stop - keys.start
        first = keys.start - (rows.start + tile.S - tile.T)  # from the first query
        ahead = torch.arange(first - n_rows, first + n_keys, device=tile.device)
        line = self.part.of_distance(ahead, self.dtype).contiguous()  # H n_rows+n_keys
        return line.unfold(-1, n_keys, 1)[:, 1:].flip(1)[None]
