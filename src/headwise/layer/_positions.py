"""Rotary position embedding (RoPE): rotates queries and keys by their positions.

The product of a rotated query and key depends only on the distance between their positions.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError
from headwise.shapes import is_size

Positions = Int[Tensor, "b T"]  # one row per text, or a single row for all texts


class CosSin(NamedTuple):
    """The cosines and signed sines of a RoPE rotation, per position and feature.

    A rotated feature is `x · cos + partner · sin`, where `partner` is the other feature of its
    pair. The sine is negative for the first feature of a pair and positive for the second.
    """

    cos: Float[Tensor, "b 1 T width"]
    sin: Float[Tensor, "b 1 T width"]


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
        return CosSin(self._join_pairs(cos, cos).to(dtype), self._join_pairs(-sin, sin).to(dtype))

    def rotate_by(self, x: Float[Tensor, "B H T D"], cos_sin: CosSin) -> Float[Tensor, "B H T D"]:
        """Rotate queries or keys by precomputed cosines and sines."""
        features, unrotated = x[..., : self.width], x[..., self.width :]
        if self.pairing == "half":
            first, second = features.chunk(2, dim=-1)
        else:
            first, second = features[..., 0::2], features[..., 1::2]
        partners = self._join_pairs(second, first)
        rotated = torch.addcmul(features * cos_sin.cos, partners, cos_sin.sin)
        return torch.cat((rotated, unrotated), dim=-1) if unrotated.shape[-1] else rotated

    def _join_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Put the first and the second feature of each pair at their places in the head."""
        if self.pairing == "half":
            return torch.cat((first, second), dim=-1)
        return torch.stack((first, second), dim=-1).flatten(-2)
