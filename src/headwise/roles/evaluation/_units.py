"""The units of a batch of texts (tokens, words or mentions), and the attention between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.roles.relations import Grid, Item


@dataclass(frozen=True)
class _Pieces:
    """The tokens that units are made of: the first of each, and those that come after it."""

    first: Int[Tensor, "B n"]
    size: Int[Tensor, "B n"]
    text: Int[Tensor, " F"]
    unit: Int[Tensor, " F"]
    token: Int[Tensor, " F"]

    def to(self, device: torch.device) -> "_Pieces":
        return _Pieces(*(one.to(device) for one in vars(self).values()))


class Units:
    """What is a query and a key on one grid, in each text of a batch.

    Attributes:
        n: Units in the longest text. On the grid of tokens a unit is its token, wherever it
            stands; only what is text is a candidate.
        units: The tokens of each unit of each text; none for a word of another piece.
    """

    def __init__(self, grid: Grid, items: Sequence[Item], S: int) -> None:
        self.grid, self._S = grid, S
        self.units = [item.units[grid] for item in items]
        self.n = S if grid == "token" else max(1, *(len(one) for one in self.units))

    def tokens_of(self, text: int, unit: int) -> Sequence[int]:
        return (unit,) if self.grid == "token" else self.units[text][unit]

    @cached_property
    def barred(self) -> Bool[Tensor, "B #n n"]:
        """Who is no candidate: what is not there, and among words and mentions oneself."""
        made = torch.zeros(len(self.units), self.n, self._S)
        for at, units in enumerate(self.units):
            for unit, tokens in enumerate(units):
                made[at, tokens[0] if self.grid == "token" else unit, list(tokens)] = 1.0
        gone = (made.sum(-1) == 0)[:, None]
        return gone if self.grid == "token" else gone | (made @ made.mT > 0)

    def fold(self, weights: Float[Tensor, "B h T S"]) -> Float[Tensor, "B h n n"]:
        """The attention of units: over the pieces of a query the mean, over those of a key the sum.

        A mention is what the piece that is attended to most says of it: a sum would favour long
        names.

        Source:
            Clark et al. 2019, section 4.1.
        """
        if self.grid == "token":
            return weights
        return self._of_words(weights) if self.grid == "word" else self._of_mentions(weights)

    def _of_words(self, weights: Float[Tensor, "B h T S"]) -> Float[Tensor, "B h n n"]:
        B, h, _, _ = weights.shape
        pieces = self._pieces.to(weights.device)
        heads = torch.arange(h, device=weights.device)
        texts = torch.arange(B, device=weights.device)
        # Most words are one token: theirs are copied, the others are added to them.
        asked = _rows(weights, texts[:, None, None], heads[:, None], pieces.first[:, None])
        more = _rows(weights, pieces.text, heads[:, None], pieces.token)
        into = (pieces.text * h + heads[:, None]) * self.n + pieces.unit
        asked.flatten(0, 2).index_add_(0, into.flatten(), more.flatten(0, 1))
        asked /= pieces.size[:, None, :, None]
        folded = asked.gather(3, pieces.first[:, None, None].expand(B, h, self.n, self.n))
        rows = torch.arange(self.n, device=weights.device)
        at = pieces.text[:, None, None], heads[:, None], rows
        more = asked[*at, pieces.token[:, None, None]]
        return folded.index_put_((*at, pieces.unit[:, None, None]), more, accumulate=True)

    def _of_mentions(self, weights: Float[Tensor, "B h T S"]) -> Float[Tensor, "B h n n"]:
        B, h, _, _ = weights.shape
        token, known = (one.to(weights.device) for one in self._padded)
        n, p = known.shape[1:]
        heads = torch.arange(h, device=weights.device)
        texts = torch.arange(B, device=weights.device)
        flat = token.flatten(1)[:, None]  # B 1 np
        asked = _rows(weights, texts[:, None, None], heads[:, None], flat)
        between = asked.gather(3, flat[:, :, None].expand(B, h, n * p, n * p))
        between = between.view(B, h, n, p, n, p)
        most = between.masked_fill(~known[:, None, None, None], 0.0).amax(-1)
        there = known[:, None, ..., None].to(weights)  # B 1 n p 1
        return (most * there).sum(3) / there.sum(3).clamp(min=1.0)

    @cached_property
    def _pieces(self) -> _Pieces:
        first = torch.zeros(len(self.units), self.n, dtype=torch.int64)
        size = torch.ones_like(first)
        more = [
            (text, unit, token)
            for text, units in enumerate(self.units)
            for unit, tokens in enumerate(units)
            for token in tokens[1:]
        ]
        for text, units in enumerate(self.units):
            for unit, tokens in enumerate(units):
                if tokens:
                    first[text, unit], size[text, unit] = tokens[0], len(tokens)
        columns = torch.tensor(more, dtype=torch.int64).reshape(-1, 3)
        return _Pieces(first, size, *columns.unbind(1))

    @cached_property
    def _padded(self) -> tuple[Int[Tensor, "B n p"], Bool[Tensor, "B n p"]]:
        """The tokens of each unit side by side, and where there is one."""
        longest = max((len(one) for units in self.units for one in units), default=0)
        token = torch.zeros(len(self.units), self.n, max(1, longest), dtype=torch.int64)
        known = torch.zeros_like(token, dtype=torch.bool)
        for text, units in enumerate(self.units):
            for unit, tokens in enumerate(units):
                token[text, unit, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int64)
                known[text, unit, : len(tokens)] = True
        return token, known


def _rows(weights: Tensor, text: Tensor, head: Tensor, query: Tensor) -> Tensor:
    """Rows of weights, copied as they lie in memory."""
    _, h, T, S = weights.shape
    at = (text * h + head) * T + query
    return weights.reshape(-1, S).index_select(0, at.flatten()).view(*at.shape, S)
