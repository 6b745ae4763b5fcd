"""Position biases on the logits: ALiBi and T5's relative bias.

Both depend only on the distance between a query and a key.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.kernels import Bias
from headwise.masks.tiles import Tile
from headwise.shapes import is_size

# One row per text, or a single row for all texts.
Queries = Int[Tensor, "b T"]
Keys = Int[Tensor, "b S"]


@runtime_checkable
class PositionBias(Protocol):
    """A bias on the logits that depends on the positions of query and key."""

    @property
    def n_heads(self) -> int: ...

    def __call__(
        self, query_at: Queries, key_at: Keys, dtype: torch.dtype
    ) -> Float[Tensor, "b H T S"]: ...


@runtime_checkable
class DistanceBias(PositionBias, Protocol):
    """A position bias that depends only on the key's position minus the query's."""

    def of_distance(
        self, ahead: Int[Tensor, "*shape"], dtype: torch.dtype
    ) -> Float[Tensor, " H *shape"]: ...


@dataclass(frozen=True)
class PositionedBias(Bias):
    """A position bias at given query and key positions, computed one tile at a time.

    Where positions are consecutive, the bias is constant along each diagonal, so it is computed
    once per distance and not for every pair.
    """

    part: PositionBias
    query_at: Queries
    key_at: Keys
    dtype: torch.dtype
    in_steps: bool  # whether positions are consecutive and the last query is the last key

    @property
    def batch(self) -> tuple[int, int]:
        return max(len(self.query_at), len(self.key_at)), self.part.n_heads

    @property
    def by_distance(self) -> bool:
        return self.in_steps and isinstance(self.part, DistanceBias)

    def tile(self, tile: Tile) -> Float[Tensor, "b H R n"]:
        rows, keys = tile.rows, tile.keys
        if self.in_steps and isinstance(self.part, DistanceBias):
            # A traced graph has no strided views of symbolic length.
            if torch.compiler.is_compiling():
                return self.part.of_distance(tile.key_at - tile.query_at, self.dtype)[None]
            n_rows, n_keys = rows.stop - rows.start, keys.stop - keys.start
            first = keys.start - (rows.start + tile.S - tile.T)  # from the first query
            ahead = torch.arange(first - n_rows, first + n_keys, device=tile.device)
            line = self.part.of_distance(ahead, self.dtype).contiguous()  # H n_rows+n_keys
            return line.unfold(-1, n_keys, 1)[:, 1:].flip(1)[None]
        query_at = self.query_at[:, rows.start : rows.stop]
        return self.part(query_at, self.key_at[:, keys.start : keys.stop], self.dtype)


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
        _check_heads("ALiBi", self.n_heads)

    def slopes(self) -> tuple[float, ...]:
        """The penalty of each head for one token of distance."""
        whole = 2 ** math.floor(math.log2(self.n_heads))
        slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
        between = [2 ** (-4 * (2 * head + 1) / whole) for head in range(self.n_heads - whole)]
        return (*slopes, *between)

    def __call__(
        self, query_at: Queries, key_at: Keys, dtype: torch.dtype
    ) -> Float[Tensor, "b H T S"]:
        ahead = key_at[:, None, :] - query_at[:, :, None]
        return self.of_distance(ahead, dtype).transpose(0, 1)

    def of_distance(
        self, ahead: Int[Tensor, "*shape"], dtype: torch.dtype
    ) -> Float[Tensor, " H *shape"]:
        """The bias of keys `ahead` tokens after their queries, one per head."""
        work = torch.promote_types(dtype, torch.float32)
        slopes = torch.tensor(self.slopes(), dtype=work, device=ahead.device)
        return -slopes.view(-1, *[1] * ahead.ndim) * ahead.abs().to(work)


class T5Bias(nn.Module):
    """A learned bias per head and bucket of distances.

    Small distances have one bucket each. Larger ones share buckets that widen logarithmically.

    Args:
        n_buckets: The number of buckets. If `bidirectional`, half of them are for later keys.
        max_distance: All distances from this one on share the last bucket.
        bidirectional: Whether keys after the query have buckets of their own (T5's encoder), or
            share the bucket of distance 0 (its decoder).
    Raises:
        ArgumentError: `n_heads` is not positive, there are too few buckets, or the buckets of
            single distances already reach `max_distance`.
    Source:
        Raffel et al. 2020, section 2.1 (arXiv:1910.10683).
    """

    def __init__(
        self,
        n_heads: int,
        n_buckets: int = 32,
        max_distance: int = 128,
        *,
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        _check_heads("T5Bias", n_heads)
        self.n_heads, self.max_distance, self.bidirectional = n_heads, max_distance, bidirectional
        self.n_per_side = n_buckets // 2 if bidirectional else n_buckets
        if (
            self.n_per_side < 2
            or n_buckets % (1 + bidirectional)
            or max_distance <= self.n_per_side // 2
        ):
            raise ArgumentError(
                f"T5Bias: n_buckets={n_buckets}, max_distance={max_distance}, bidirectional="
                f"{bidirectional}. Give at least two buckets per side and a larger distance."
            )
        self.buckets = nn.Embedding(n_buckets, n_heads)

    def forward(
        self, query_at: Queries, key_at: Keys, dtype: torch.dtype
    ) -> Float[Tensor, "b H T S"]:
        ahead = key_at[:, None, :] - query_at[:, :, None]
        return self.of_distance(ahead, dtype).transpose(0, 1)

    def of_distance(
        self, ahead: Int[Tensor, "*shape"], dtype: torch.dtype
    ) -> Float[Tensor, " H *shape"]:
        """The bias of keys `ahead` tokens after their queries, one per head."""
        return self.buckets(self.bucket(ahead)).movedim(-1, 0).to(dtype)

    def bucket(self, ahead: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The bucket of a key `ahead` tokens after its query."""
        away = ahead.abs() if self.bidirectional else (-ahead).clamp(min=0)
        single = self.n_per_side // 2  # distances below this have a bucket each
        growth = (away.clamp(min=single).float() / single).log() / math.log(
            self.max_distance / single
        )
        shared = single + (growth * (self.n_per_side - single)).long()
        bucket = torch.where(away < single, away, shared.clamp(max=self.n_per_side - 1))
        return bucket + self.n_per_side * (ahead > 0) if self.bidirectional else bucket

    def extra_repr(self) -> str:
        return f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def _check_heads(part: str, n_heads: int) -> None:
    if not is_size(n_heads):
        raise ArgumentError(f"{part}: n_heads={n_heads!r}. Give a positive whole number.")
