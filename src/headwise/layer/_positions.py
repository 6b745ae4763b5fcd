"""Where a token stands, turned into queries and keys: RoPE.

Their product then depends only on how far apart they are.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError
from headwise.shapes import is_size

Queries = Int[Tensor, "b T"]  # one row for each text, or a single row for all of them


class Turns(NamedTuple):
    """What each feature and its partner in the pair are multiplied by, at each position.

    A pair's first feature gets `cos` of itself and `−sin` of the second, the second `cos` of
    itself and `+sin` of the first.
    """

    own: Float[Tensor, "b 1 T width"]
    partner: Float[Tensor, "b 1 T width"]


@runtime_checkable
class Scaling(Protocol):
    """Turning more slowly, to read texts `factor` times longer than those trained on."""

    @property
    def factor(self) -> float: ...

    @property
    def magnitude(self) -> float:
        """What turned queries and keys are multiplied by."""

    def slow(self, frequencies: Float[Tensor, " pairs"], rope: "RoPE") -> Float[Tensor, " pairs"]:
        """The frequencies to turn by, in place of those."""


@dataclass(frozen=True)
class RoPE:
    """Turn pairs of features of queries and keys by angles that grow with the position.

    Args:
        width: How many of a head's leading features are turned; the rest is left as it is.
        base: The slowest pair turns about `base` times more slowly than the first.
        pairing: "half" pairs feature `i` with `i + width / 2` (Llama, GPT-NeoX),
            "interleaved" `2i` with `2i + 1` (RoFormer, GPT-J).
        scaling: How to read longer texts: `LinearScaling`, `NTKScaling`, `YaRN`,
            `Llama3Scaling`. None turns by the plain frequencies.
    Raises:
        ShapeError: `width` is odd or not positive.
        ArgumentError: `base` is not above 1, the pairing is unknown, `scaling` is no such part,
            or its factor is below 1 or endless.
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
                f"RoPE: width={self.width!r}. Features turn in pairs: give a positive even number."
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
        """By how much each pair turns from one position to the next, in radians."""
        pairs = torch.arange(0, self.width, 2, dtype=dtype, device=device) / self.width
        frequencies = self.base**-pairs
        return frequencies if self.scaling is None else self.scaling.slow(frequencies, self)

    def rotate(self, x: Float[Tensor, "B H T D"], at: Queries) -> Float[Tensor, "B H T D"]:
        """The queries or keys of tokens that stand at these positions, turned."""
        return self.turn(x, self.turns(at, x.dtype))

    def turns(self, at: Queries, dtype: torch.dtype) -> Turns:
        """How far to turn at these positions, for queries and keys of that dtype."""
        # Not a buffer: `layer.bfloat16()` would round it, and far positions would be garbled.
        work = torch.promote_types(dtype, torch.float32)
        angles = at.to(work)[:, None, :, None] * self.frequencies(work, at.device)  # b 1 T pairs
        cos, sin = angles.cos(), angles.sin()
        if self.scaling is not None:
            cos, sin = cos * self.scaling.magnitude, sin * self.scaling.magnitude
        # The turning itself is done in the dtype of queries and keys, which is twice as fast in
        # half precision as in float32 with its casts, and as exact as their own rounding.
        return Turns(self._joined(cos, cos).to(dtype), self._joined(-sin, sin).to(dtype))

    def turn(self, x: Float[Tensor, "B H T D"], turns: Turns) -> Float[Tensor, "B H T D"]:
        """Queries or keys, turned so far."""
        turning, still = x[..., : self.width], x[..., self.width :]
        if self.pairing == "half":
            one, two = turning.chunk(2, dim=-1)
        else:
            one, two = turning[..., 0::2], turning[..., 1::2]
        turned = torch.addcmul(turning * turns.own, self._joined(two, one), turns.partner)
        return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned

    def _joined(self, one: Tensor, two: Tensor) -> Tensor:
        """The first and the second feature of each pair, each in its place."""
        if self.pairing == "half":
            return torch.cat((one, two), dim=-1)
        return torch.stack((one, two), dim=-1).flatten(-2)


@dataclass(frozen=True)
class LinearScaling:
    """Every pair turns `factor` times more slowly (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    magnitude: float = 1.0

    def slow(self, frequencies: Float[Tensor, " pairs"], rope: RoPE) -> Float[Tensor, " pairs"]:
        return frequencies / self.factor


@dataclass(frozen=True)
class NTKScaling:
    """A larger base: the slowest pair turns `factor` times more slowly, the fastest as before.

    Source:
        Peng et al. 2023, section 3.1 (arXiv:2309.00071).
    """

    factor: float
    magnitude: float = 1.0

    def slow(self, frequencies: Float[Tensor, " pairs"], rope: RoPE) -> Float[Tensor, " pairs"]:
        pair = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
        return frequencies * self.factor ** (-pair / max(1, len(frequencies) - 1))


@dataclass(frozen=True)
class YaRN:
    """Slow pairs turn `factor` times more slowly, fast ones as before, those between in between.

    Fast is a pair that turns more than `fast_turns` times within the length trained on, slow
    one that turns less than `slow_turns` times.

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
        return 0.1 * math.log(self.factor) + 1.0

    def slow(self, frequencies: Float[Tensor, " pairs"], rope: RoPE) -> Float[Tensor, " pairs"]:
        first = max(0, math.floor(self._pair_of(self.fast_turns, rope)))
        last = min(rope.width - 1, math.ceil(self._pair_of(self.slow_turns, rope)))
        pair = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
        slowness = ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)
        return frequencies * (1 - slowness) + frequencies / self.factor * slowness

    def _pair_of(self, turns: float, rope: RoPE) -> float:
        """The (fractional) pair that turns so many times within the length trained on."""
        longest = math.log(self.trained_length / (turns * 2 * math.pi))
        return rope.width * longest / (2 * math.log(rope.base))


@dataclass(frozen=True)
class Llama3Scaling:
    """Pairs of long waves turn `factor` times more slowly, those of short waves as before.

    A wave is short below `trained_length / short` tokens, long above `trained_length / long`.

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

    def slow(self, frequencies: Float[Tensor, " pairs"], rope: RoPE) -> Float[Tensor, " pairs"]:
        waves = self.trained_length * frequencies / (2 * math.pi)  # within the length trained on
        fastness = ((waves - self.long) / (self.short - self.long)).clamp(0, 1)
        return frequencies * fastness + frequencies / self.factor * (1 - fastness)


def _check_scaling(scaling: YaRN | Llama3Scaling, in_order: bool) -> None:
    if not (in_order and scaling.trained_length > 0):
        raise ArgumentError(
            f"{scaling}: its two limits and the length trained on are positive, and the limit of "
            f"fast turns, of short waves, is the larger one. Give such numbers."
        )
