"""Position biases on the logits, such as ALiBi."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
        if not is_size(self.n_heads):
            raise ArgumentError(f"ALiBi: n_heads={self.n_heads!r}. Give a positive whole number.")

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
