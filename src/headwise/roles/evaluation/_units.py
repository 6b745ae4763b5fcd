"""The units of a batch of texts (tokens, words or mentions), and the attention between them."""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.roles.relations import Grid, Item

_TOKENS = 2048  # in one batch


class Units:
    """The queries and keys of one grid (tokens, words or mentions) in each text of a batch.

    Attributes:
        items: The texts.
        n: The number of units in the longest text. On the grid of tokens, units are numbered by
            the positions of their tokens, and special tokens are not candidates.
        units: The tokens of each unit of each text; empty for a word of another piece.
    """

    def __init__(self, grid: Grid, items: Sequence[Item], S: int) -> None:
        self.items, self.grid, self._S = items, grid, S
        self.units = [item.units[grid] for item in items]
        self.n = S if grid == "token" else max(1, *(len(units) for units in self.units))

    def tokens_of(self, text: int, unit: int) -> Sequence[int]:
        return (unit,) if self.grid == "token" else self.units[text][unit]

    def by_tag(self, tags: Sequence[str]) -> tuple[Int[Tensor, "B tag m"], Int[Tensor, "B n"]]:
        """The units with each part of speech, padded with −1, and the part of speech of each."""
        number = {tag: column for column, tag in enumerate(tags)}
        tag_of_unit = torch.full((len(self.items), self.n), -1)
        members: list[list[list[int]]] = []
        for row, item in enumerate(self.items):
            of_tag: list[list[int]] = [[] for _ in tags]
            for word, tag in enumerate(item.tags):
                units = [word] if self.grid == "word" else item.units["word"][word]
                if tag in number:
                    of_tag[number[tag]] += units
                    tag_of_unit[row, list(units)] = number[tag]
            members.append(of_tag)
        most = max((len(units) for of_tag in members for units in of_tag), default=0)
        padded = [[units + [-1] * (most - len(units)) for units in of_tag] for of_tag in members]
        columns = torch.tensor(padded, dtype=torch.int64).view(len(self.items), len(tags), most)
        # At least one column, to reduce over.
        return torch.nn.functional.pad(columns, (0, 1), value=-1), tag_of_unit

    @cached_property
    def excluded(self) -> Bool[Tensor, "B #n n"]:
        """Which units are not candidates: missing ones, and a word's or mention's own tokens."""
        members = torch.zeros(len(self.units), self.n, self._S)
        for text, units in enumerate(self.units):
            for unit, tokens in enumerate(units):
                members[text, tokens[0] if self.grid == "token" else unit, list(tokens)] = 1.0
        missing = (members.sum(-1) == 0)[:, None]
        return missing if self.grid == "token" else missing | (members @ members.mT > 0)

    def fold(self, weights: Float[Tensor, "B h T S"]) -> Float[Tensor, "B h n n"]:
        """The attention between units: mean over the tokens of a query, sum over those of a key.

        A mention that is a key takes the maximum over its tokens instead, because a sum would
        favour long names.

        Source:
            Clark et al. 2019, section 4.1.
        """
        if self.grid == "token":
            return weights
        return self._of_words(weights) if self.grid == "word" else self._of_mentions(weights)

    def fold_keys(
        self, weights: Float[Tensor, "K S"], text: Int[Tensor, " K"]
    ) -> Float[Tensor, "K n"]:
        """The attention of single tokens to words or mentions, as `fold` has it for keys."""
        token, present = (part[text] for part in self.padded)  # K n p
        to_tokens = weights.gather(1, token.flatten(1)).view(token.shape)
        to_tokens = to_tokens.masked_fill(~present, 0.0)
        return to_tokens.sum(-1) if self.grid == "word" else to_tokens.amax(-1)

    def _of_words(self, weights: Float[Tensor, "B h T S"]) -> Float[Tensor, "B h n n"]:
        B, h, _, _ = weights.shape
        first, size, text, unit, token = (part.to(weights.device) for part in self._tokens)
        heads = torch.arange(h, device=weights.device)
        texts = torch.arange(B, device=weights.device)
        # Most words are one token: copy the first token of each, then add the others.
        queries = _rows(weights, texts[:, None, None], heads[:, None], first[:, None])
        more = _rows(weights, text, heads[:, None], token)
        into = (text * h + heads[:, None]) * self.n + unit
        queries.flatten(0, 2).index_add_(0, into.flatten(), more.flatten(0, 1))
        queries /= size[:, None, :, None]
        folded = queries.gather(3, first[:, None, None].expand(B, h, self.n, self.n))
        rows = torch.arange(self.n, device=weights.device)
        cells = text[:, None, None], heads[:, None], rows
        more = queries[*cells, token[:, None, None]]
        return folded.index_put_((*cells, unit[:, None, None]), more, accumulate=True)

    def _of_mentions(self, weights: Float[Tensor, "B h T S"]) -> Float[Tensor, "B h n n"]:
        B, h, _, _ = weights.shape
        token, present = (part.to(weights.device) for part in self.padded)
        n, p = present.shape[1:]
        heads = torch.arange(h, device=weights.device)
        texts = torch.arange(B, device=weights.device)
        flat = token.flatten(1)[:, None]  # B 1 np
        queries = _rows(weights, texts[:, None, None], heads[:, None], flat)
        between = queries.gather(3, flat[:, :, None].expand(B, h, n * p, n * p))
        between = between.view(B, h, n, p, n, p)
        most = between.masked_fill(~present[:, None, None, None], 0.0).amax(-1)
        counted = present[:, None, ..., None].to(weights)  # B 1 n p 1
        return (most * counted).sum(3) / counted.sum(3).clamp(min=1.0)

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The first token of each unit and its size; text, unit and token of all further tokens."""
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
        text_of, unit_of, token_of = columns.unbind(1)
        return first, size, text_of, unit_of, token_of

    @property
    def longest(self) -> int:
        """The number of tokens of the longest unit."""
        return max(1, *(len(tokens) for units in self.units for tokens in units), 1)

    @cached_property
    def padded(self) -> tuple[Int[Tensor, "B n p"], Bool[Tensor, "B n p"]]:
        """The tokens of each unit, padded to the longest unit, and which of them are present."""
        token = torch.zeros(len(self.units), self.n, self.longest, dtype=torch.int64)
        present = torch.zeros_like(token, dtype=torch.bool)
        for text, units in enumerate(self.units):
            for unit, tokens in enumerate(units):
                token[text, unit, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int64)
                present[text, unit, : len(tokens)] = True
        return token, present


def _rows(weights: Tensor, text: Tensor, head: Tensor, query: Tensor) -> Tensor:
    """Select whole rows of weights, which are contiguous in memory."""
    _, h, T, S = weights.shape
    row = (text * h + head) * T + query
    return weights.reshape(-1, S).index_select(0, row.flatten()).view(*row.shape, S)


def rows_of_batches(items: Sequence[Item], most: int) -> list[list[int]]:
    """Group at most `most` items of about equal length, so that there is little padding."""
    order = sorted(range(len(items)), key=lambda index: len(items[index].ids))
    batches: list[list[int]] = []
    for index in order:
        longest = len(items[index].ids)
        size = len(batches[-1]) + 1 if batches else 0
        if not batches or size > most or size * longest > _TOKENS:
            batches.append([])
        batches[-1].append(index)
    return batches
