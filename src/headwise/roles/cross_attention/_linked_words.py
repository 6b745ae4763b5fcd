"""Linked words of texts and their translations, as queries and sources of alignment."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.corpora import AnnotatedText
from headwise.errors import ArgumentError
from headwise.models import device_of
from headwise.models.texts import pad
from headwise.roles.cross_attention._weights import cross_attention
from headwise.roles.relations import TokenText, tokenize
from headwise.roles.scores import TIE
from headwise.tables import Head

_FARTHEST = 40  # words that an offset may reach back
_BATCH = 16  # pairs per forward pass


@dataclass(frozen=True)
class LinkedWords:
    """The linked words of a text as `Q` queries, and their `S` candidates on the other side.

    Attributes:
        queries: The linked words: of the translation, or for `back` of the source.
        candidates: The words before the translation, or for `back` those of the translation.
        gold: Which candidates each query is linked with.
        heuristics: The candidate that each heuristic names for each query; −1 for none.
    """

    text: AnnotatedText
    queries: Sequence[int]
    candidates: Sequence[int]
    gold: Float[Tensor, "Q S"]
    heuristics: np.ndarray

    @classmethod
    def of(
        cls, text: AnnotatedText, tokens: Sequence[Sequence[int]], is_query: Callable[[int], bool]
    ) -> "LinkedWords | None":
        """The linked words that have tokens; None without any.

        Args:
            tokens: The tokens of each word.
            is_query: Whether a word with tokens may be a query.
        """
        links: dict[int, set[int]] = {}
        for word, source in text.links:
            if source < word and tokens[word] and tokens[source] and is_query(word):
                links.setdefault(word, set()).add(source)
        if not links:
            return None
        begin, last = min(links), max(links)
        sources = [word for word in range(begin) if tokens[word]]
        heuristics = [
            [_index_of(sources, word - offset) for offset in range(1, _FARTHEST)]
            + [(word - begin) * len(sources) // (last - begin + 1)]
            for word in links
        ]
        return cls(text, list(links), sources, _gold(links, sources), np.array(heuristics))

    def back(self, tokens: Sequence[Sequence[int]]) -> "LinkedWords":
        """The linked sources as queries, which choose among the words of the translation."""
        links: dict[int, set[int]] = {}
        for row, word in zip(self.gold.tolist(), self.queries, strict=True):
            for source, linked in zip(self.candidates, row, strict=True):
                if linked:
                    links.setdefault(source, set()).add(word)
        begin = min(self.queries)
        words = [word for word in range(begin, len(tokens)) if tokens[word]]
        heuristics = [
            [_index_of(words, source + offset) for offset in range(1, _FARTHEST)]
            + [source * len(words) // begin]
            for source in links
        ]
        return replace(
            self,
            queries=list(links),
            candidates=words,
            gold=_gold(links, words),
            heuristics=np.array(heuristics),
        )

    def hits(self, attention: Float[Tensor, "H C Q S"]) -> Float[Tensor, "C H"]:
        """The number of queries that each head aligns correctly, per convention; ties share."""
        top = (attention >= attention.amax(-1, keepdim=True) * (1 - TIE)).float()
        right = (top * self.gold).sum(-1) / top.sum(-1)
        return right.sum(-1).T

    def heuristic_hits(self) -> np.ndarray:
        """The number of correct queries of each heuristic: every offset, and last the diagonal."""
        named = self.gold.numpy()[np.arange(len(self.gold))[:, None], self.heuristics]
        return (named * (self.heuristics >= 0)).sum(0)


def _gold(links: Mapping[int, Collection[int]], candidates: Sequence[int]) -> Tensor:
    return torch.tensor(
        [[float(word in linked) for word in candidates] for linked in links.values()]
    )


def _index_of(candidates: Sequence[int], word: int) -> int:
    return candidates.index(word) if word in candidates else -1


@dataclass(frozen=True)
class LinkedPair:
    """The linked words of a pair of texts.

    Attributes:
        source: The tokens that the encoder reads.
        outputs: The tokens that the decoder predicts, one from each of its positions.
        sources: The tokens of each candidate source.
        queries: For each convention (identity, prediction) the decoder positions of each query.
    """

    words: LinkedWords
    source: Sequence[int]
    outputs: Sequence[int]
    sources: Sequence[Sequence[int]]
    queries: Sequence[Sequence[Sequence[int]]]

    @classmethod
    def of(cls, text: AnnotatedText, source: TokenText, target: TokenText) -> "LinkedPair | None":
        n_sources = len(source.text.words)
        tokens = [*source.words, *target.words]
        # The token itself is read one position after the one that predicts it.
        last = len(target.ids) - 1
        words = LinkedWords.of(
            text, tokens, lambda word: word >= n_sources and tokens[word][-1] < last
        )
        if words is None:
            return None
        own = [[token + 1 for token in tokens[word]] for word in words.queries]
        first = [[tokens[word][0]] for word in words.queries]
        sources = [tokens[word] for word in words.candidates]
        return cls(words, source.ids, target.ids, sources, (own, first))

    def hits(self, weights: Float[Tensor, "H T S"]) -> Float[Tensor, "C H"]:
        """The number of queries that each head aligns correctly, per convention."""
        keys = torch.stack([weights[..., list(key)].sum(-1) for key in self.sources], -1)
        attention = [
            torch.stack([keys[:, list(query)].mean(1) for query in queries], 1)
            for queries in self.queries
        ]
        return self.words.hits(torch.stack(attention, 1).float().cpu())


def linked_pairs(tokenizer: Any, texts: Sequence[AnnotatedText], limit: int) -> list[LinkedPair]:
    """The pairs with linked words, by the length of their source.

    Raises:
        ArgumentError: a text or its translation is longer than `limit` tokens.
        UnsupportedError: the tokenizer does not report character offsets.
    """
    halves = [_halves(text) for text in texts if text.links]
    split = [tokenize(tokenizer, part, limit) for part in zip(*halves, strict=True)]
    if any(len(part.pieces) != len(halves) for part in split):
        raise ArgumentError(
            f"alignment: a text or its translation is empty, or has more than {limit} tokens. "
            f"Leave it out, or shorten it."
        )
    linked = [text for text in texts if text.links]
    pieces = zip(linked, *(part.pieces for part in split), strict=True)
    pairs = [pair for parts in pieces if (pair := LinkedPair.of(*parts)) is not None]
    return sorted(pairs, key=lambda pair: len(pair.source))


def evaluate_pairs(
    model: nn.Module, pairs: Sequence[LinkedPair]
) -> tuple[tuple[Head, ...], np.ndarray]:
    """The correct queries of each cross-attention head in each pair: `pairs C H`."""
    device = device_of(model)
    hits: list[Tensor] = []
    heads: tuple[Head, ...] = ()
    for start in range(0, len(pairs), _BATCH):
        batch = pairs[start : start + _BATCH]
        inputs = vars(pad([pair.source for pair in batch], device))
        attention = cross_attention("alignment", model, inputs, [pair.outputs for pair in batch])
        heads = attention.heads
        weights = torch.stack([attention.weights(head) for head in heads], 1)
        hits += [pair.hits(weights[row]) for row, pair in enumerate(batch)]
    return heads, torch.stack(hits).double().numpy()


def _halves(text: AnnotatedText) -> tuple[AnnotatedText, AnnotatedText]:
    """A text up to its translation, and the translation."""
    begin = text.translation or text.words[min(word for word, _ in text.links)][0]
    before = sum(end <= begin for _, end in text.words)
    target = tuple((start - begin, end - begin) for start, end in text.words[before:])
    return (
        AnnotatedText(text.text[:begin], text.words[:before]),
        AnnotatedText(text.text[begin:], target),
    )
