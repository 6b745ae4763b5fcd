"""Linked words of texts and their translations, as queries and sources of alignment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headwise.corpora import AnnotatedText

EQUAL = 1 - 1e-6  # weights this close to the largest tie with it
_FARTHEST = 40  # words that an offset may reach back


@dataclass(frozen=True)
class LinkedWords:
    """The linked words of a text as `Q` queries, and their `S` candidate sources.

    Attributes:
        queries: The linked words.
        sources: The words before the translation.
        gold: Which source words each query is linked with.
        heuristics: The source word that each heuristic names for each query; −1 for none.
    """

    text: AnnotatedText
    queries: Sequence[int]
    sources: Sequence[int]
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
        gold = torch.tensor(
            [[float(source in linked) for source in sources] for linked in links.values()]
        )
        heuristics = [
            [_index_of(sources, word - offset) for offset in range(1, _FARTHEST)]
            + [(word - begin) * len(sources) // (last - begin + 1)]
            for word in links
        ]
        return cls(text, list(links), sources, gold, np.array(heuristics))

    def hits(self, attention: Float[Tensor, "H C Q S"]) -> Float[Tensor, "C H"]:
        """The number of queries that each head aligns correctly, per convention; ties share."""
        top = (attention >= attention.amax(-1, keepdim=True) * EQUAL).float()
        right = (top * self.gold).sum(-1) / top.sum(-1)
        return right.sum(-1).T

    def heuristic_hits(self) -> np.ndarray:
        """The number of correct queries of each heuristic: every offset, and last the diagonal."""
        named = self.gold.numpy()[np.arange(len(self.gold))[:, None], self.heuristics]
        return (named * (self.heuristics >= 0)).sum(0)


def _index_of(sources: Sequence[int], word: int) -> int:
    return sources.index(word) if word in sources else -1
