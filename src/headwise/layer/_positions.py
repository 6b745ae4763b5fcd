"""Rotary position embedding (RoPE): rotates queries and keys by their positions.

The product of a rotated query and key depends only on the distance between their positions.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class Scaling(Protocol):
    """Lower RoPE frequencies, to read texts `factor` times longer than in training."""

    @property
    def factor(self) -> float: ...

    @property
    def magnitude(self) -> float:
        """The factor that multiplies rotated queries and keys."""

    def scale(self, frequencies: Float[Tensor, " pairs"], rope: "RoPE") -> Float[Tensor, " pairs"]:
        """The scaled frequencies that replace `frequencies`."""


@dataclass(frozen=True)
class RoPE:
    """Rotate pairs of features of queries and keys by angles proportional to the position.

    Args:
        width: How many leading features of a head are rotated. The others stay unchanged.
        base: The lowest frequency is about `base` times lower than the highest.
        pairing: "half" pairs feature `i` with `i + width / 2` (Llama, GPT-NeoX),
            "interleaved" `2i` with `2i + 1` (RoFormer, GPT-J).
        scaling: Context extension: `LinearScaling`, `NTKScaling`, `YaRN`, `Llama3Scaling`. None
            uses the plain frequencies.
    Raises:
        ShapeError: `width` is odd or not positive.
        ArgumentError: `base` is not above 1, the pairing is unknown, `scaling` is not a `Scaling`,
            or its factor is below 1 or infinite.
    Source:
        Su et al. 2021, eq. 15 and 34 (arXiv:2104.09864).
    """

    width: int
    base: float = 10_000.0
    pairing: Literal["half", "interleaved"] = "half"
    scaling: Scaling | None = None

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
        if not isinstance(self.scaling, Scaling | None):
            raise ArgumentError(
                f"RoPE: scaling={self.scaling!r}. Give one such as LinearScaling(4.0), or None."
            )
        if self.scaling is not None and not 1 <= self.scaling.factor < math.inf:
            raise ArgumentError(f"RoPE: factor={self.scaling.factor}. Give a number from 1 up.")

    def frequencies(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Float[Tensor, " pairs"]:
        """The angle between neighboring positions for each pair, in radians."""
        pairs = torch.arange(0, self.width, 2, dtype=dtype, device=device) / self.width
        frequencies = self.base**-pairs
        return frequencies if self.scaling is None else self.scaling.scale(frequencies, self)

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
        if self.scaling is not None:
            cos, sin = cos * self.scaling.magnitude, sin * self.scaling.magnitude
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


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    magnitude: float = 1.0

    def scale(self, frequencies: Float[Tensor, " pairs"], rope: RoPE) -> Float[Tensor, " pairs"]:
        """Divide every frequency by `factor`."""
        return frequencies / self.factor


@dataclass(frozen=True)
class NTKScaling:
    """A larger base: the lowest frequency is divided by `factor`, the highest is kept.

    Source:
        Peng et al. 2023, section 3.1 (arXiv:2309.00071).
    """

    factor: float
    magnitude: float = 1.0

    def scale(self, frequencies: Float[Tensor, " pairs"], rope: RoPE) -> Float[Tensor, " pairs"]:
        """Divide the lowest frequency by `factor`, the highest by 1, others by a power between."""
        pair = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
        return frequencies * self.factor ** (-pair / max(1, len(frequencies) - 1))


@dataclass(frozen=True)
class YaRN:
    """Low frequencies divided by `factor`, high ones kept, with a linear ramp between them.

    A frequency is high if it completes more than `fast_turns` full turns within
    `trained_length`, and low if it completes fewer than `slow_turns`.

    Raises:
        ArgumentError: `slow_turns` is not below `fast_turns`, or a number is not positive.
    Source:
        Peng et al. 2023, sections 3.2 to 3.4 (arXiv:2309.00071).
    """

    factor: float
    trained_length: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0

    def __post_init__(self) -> None:
        _check_scaling(self, self.fast_turns > self.slow_turns > 0)

    @property
    def magnitude(self) -> float:
        """The factor that multiplies rotated queries and keys."""
        return 0.1 * math.log(self.factor) + 1.0

    def scale(self, frequencies: Float[Tensor, " pairs"], rope: RoPE) -> Float[Tensor, " pairs"]:
        """Divide low frequencies by `factor`, keep high ones, and interpolate between them."""
        first = max(0, math.floor(self._pair_of(self.fast_turns, rope)))
        last = min(rope.width - 1, math.ceil(self._pair_of(self.slow_turns, rope)))
        pair = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
        ramp = ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp

    def _pair_of(self, rotations: float, rope: RoPE) -> float:
        """The (fractional) pair that completes this many rotations within `trained_length`."""
        longest = math.log(self.trained_length / (rotations * 2 * math.pi))
        return rope.width * longest / (2 * math.log(rope.base))


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequencies of long wavelengths divided by `factor`, those of short wavelengths kept.

    A wavelength is short below `trained_length / short` tokens and long above
    `trained_length / long`. Between the two, frequencies are interpolated.

    Raises:
        ArgumentError: `long` is not below `short`, or a number is not positive.
    Source:
        Llama 3.1, `apply_scaling` in its reference code.
    """

    factor: float = 8.0
    long: float = 1.0
    short: float = 4.0
    trained_length: int = 8192
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        _check_scaling(self, self.short > self.long > 0)

    def scale(self, frequencies: Float[Tensor, " pairs"], rope: RoPE) -> Float[Tensor, " pairs"]:
        """Divide low frequencies by `factor`, keep high ones, and interpolate between them."""
        turns = self.trained_length * frequencies / (2 * math.pi)  # within trained_length
        ramp = ((turns - self.long) / (self.short - self.long)).clamp(0, 1)
        return frequencies * ramp + frequencies / self.factor * (1 - ramp)


def _check_scaling(scaling: YaRN | Llama3Scaling, in_order: bool) -> None:
    if not (in_order and scaling.trained_length > 0):
        raise ArgumentError(
            f"{scaling}: both limits and trained_length must be positive, and the limit of high "
            f"frequencies (fast_turns, short) the larger one. Change these numbers."
        )
