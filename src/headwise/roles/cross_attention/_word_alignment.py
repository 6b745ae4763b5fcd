"""Word alignment by attention: accuracy and alignment error rate of every head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.corpora import Corpus
from headwise.errors import InputError
from headwise.models import device_of
from headwise.models.texts import batches, check_reads_text, context_of, reads_two_texts
from headwise.roles._hypotheses import best_of
from headwise.roles._samples import halves
from headwise.roles.cross_attention._linked_words import LinkedWords, evaluate_pairs, linked_pairs
from headwise.roles.relations import Item, TokenText, texts_of, tokenize
from headwise.roles.scores import Nodes
from headwise.tables import Head, ratio_interval
from headwise.watch import Request, observe

Convention = Literal["identity", "prediction", "source"]
CONVENTIONS: tuple[Convention, ...] = ("identity", "prediction")  # from a word to its source
BACK: Convention = "source"
_BATCH = 16  # texts per forward pass


def alignment(model: nn.Module, tokenizer: Any, corpus: Corpus, *, seed: int = 0) -> pd.DataFrame:
    """Evaluate each head as a word aligner, which links a word to the source it attends to most.

    The candidates are the words before the first linked word; only linked words are queries.
    Two conventions differ in the token that is the query: under `identity` it is the word
    itself, under `prediction` the token before it, from which a decoder predicts the word. The
    other direction is a row of its own: under `source` the query is the source word, and the
    candidates are the words from the first linked one on. Only a model whose heads attend to
    later tokens can be asked that. Attention is averaged over the tokens of a query and summed
    over those of a candidate.

    In an encoder-decoder the heads are those of cross-attention: the encoder reads the source,
    up to `AnnotatedText.translation`, and the decoder its translation. There all queries are of
    the decoder, so that one direction, from a word to its source, is all there is.

    The best offset is selected on half of the texts, and all numbers come from the other half.
    Ties are scored in expectation.

    Args:
        corpus: Texts with links, each source before its translation: `read_aligned` reads them.
        seed: The seed of the halves and of the bootstrap.
    Returns:
        A row per head and convention (`query`): `accuracy`, the share of queries whose strongest
        candidate is linked with them, with its interval (95 %, over texts), and on the selection
        half (`chosen_half`); `aer`, the alignment error rate with every link sure, from 0 to 1;
        the scores of `chance`, the best `offset` and the `diagonal`; `n` words in `texts` texts.
    Raises:
        ArgumentError: something in the corpus is not a text.
        InputError: no text has a word that translates an earlier one.
        UnsupportedError: the model reads no text or cannot be observed exactly, or the tokenizer
            does not report character offsets.
    Source:
        Och & Ney 2003, section 2.2: `AER = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)`, `S = P`.
    """
    check_reads_text("alignment", model)
    _, texts = texts_of("alignment", corpus)
    if reads_two_texts(model):
        pairs = linked_pairs(tokenizer, texts, context_of(model, tokenizer))
        _check_linked(pairs, len(texts))
        return _frame([pair.words for pair in pairs], *evaluate_pairs(model, pairs), seed)
    pieces = tokenize(tokenizer, texts, context_of(model, tokenizer)).pieces
    linked = [text for piece in pieces if (text := _LinkedText.of(piece)) is not None]
    _check_linked(linked, len(texts))
    # Pieces are batched by length; the sort is stable.
    linked.sort(key=lambda text: len(text.item.ids))
    heads, hits, back = _evaluate(model, linked)
    frame = _frame([text.words for text in linked], heads, hits, seed)
    if back is None:
        return frame
    sums = _AlignmentSums.of([text.back for text in linked], back)
    return pd.concat([frame, sums.frame(heads, BACK, 0, seed)], ignore_index=True)


def _check_linked(linked: Sequence[Any], n_texts: int) -> None:
    if not linked:
        raise InputError(
            f"alignment: no word of {n_texts} texts is linked with an earlier one. Give texts "
            f"with links, each source before its translation."
        )


def _frame(
    linked: Sequence[LinkedWords], heads: Sequence[Head], hits: np.ndarray, seed: int
) -> pd.DataFrame:
    """The rows of both conventions from a word to its source."""
    sums = _AlignmentSums.of(linked, hits)
    frames = [sums.frame(heads, query, n, seed) for n, query in enumerate(CONVENTIONS)]
    return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True)
class _LinkedText:
    """The linked words of a piece, in both directions, and its units: the source words, the
    queries of each convention, the candidates and the queries of the other direction.
    """

    words: LinkedWords
    back: LinkedWords
    item: Item

    @classmethod
    def of(cls, piece: TokenText) -> "_LinkedText | None":
        tokens = piece.words
        words = LinkedWords.of(piece.text, tokens, lambda word: tokens[word][0] > 0)
        if words is None:
            return None
        back = words.back(tokens)
        units = [tokens[source] for source in words.candidates]
        units += [tokens[word] for word in words.queries]
        units += [[tokens[word][0] - 1] for word in words.queries]
        units += [tokens[word] for word in (*back.candidates, *back.queries)]
        item = Item(piece.ids, {"token": (), "word": units, "mention": ()}, {})
        return cls(words, back, item)

    def hits(self, weights: Float[Tensor, "H n n"]) -> Float[Tensor, "C H"]:
        """The number of queries that each head aligns correctly, per convention."""
        Q, S = self.words.gold.shape
        return self.words.hits(weights[:, S : S + 2 * Q, :S].reshape(len(weights), 2, Q, S))

    def hits_back(self, weights: Float[Tensor, "H n n"]) -> Float[Tensor, "1 H"]:
        """The number of source words for which each head finds a translation."""
        Q, S = self.words.gold.shape
        start = S + 2 * Q
        Q, S = self.back.gold.shape
        rows = weights[:, start + S : start + S + Q, start : start + S]
        return self.back.hits(rows[:, None])


@torch.no_grad()
def _evaluate(
    model: nn.Module, texts: Sequence[_LinkedText]
) -> tuple[list[Head], np.ndarray, np.ndarray | None]:
    """The correct queries of each head in each piece, under each convention: `pieces C H`.

    And those of the other direction, or None if no head attends to later tokens.
    """
    device = device_of(model)
    hits: list[Tensor] = []
    back: list[Tensor] = []
    looks_ahead = False
    heads: list[Head] = []
    with in_evaluation(model), observe(model, Request(statistics=(), maps=True)) as watch:
        for batch in batches([text.item.ids for text in texts], _BATCH, device):
            rows = texts[len(hits) : len(hits) + len(batch.input_ids)]
            nodes = Nodes("word", [text.item for text in rows], batch.input_ids.shape[1])
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
            layers = watch.layers()
            heads = [head for layer in layers for head in layer.heads]
            folded = [
                nodes.fold(block.weights).cpu() for layer in layers for block in layer.blocks()
            ]
            weights = torch.cat(folded, dim=1)
            hits += [text.hits(weights[row]) for row, text in enumerate(rows)]
            back += [text.hits_back(weights[row]) for row, text in enumerate(rows)]
            looks_ahead |= any(bool(layer.visible.triu(1).any()) for layer in layers)
    both = [torch.stack(part).double().numpy() for part in (hits, back)]
    return heads, both[0], both[1] if looks_ahead else None


@dataclass(frozen=True)
class _AlignmentSums:
    """Sums per text: queries, links, and the correct queries of heads and heuristics.

    Attributes:
        right: The correct queries of each head under each convention.
        n: The number of queries.
        links: The number of their links.
        heuristics: The correct queries of every offset, and last of the diagonal.
        chance: The expected correct queries of a random choice among the source words.
    """

    right: Float[np.ndarray, "M C H"]
    n: Float[np.ndarray, " M"]
    links: Float[np.ndarray, " M"]
    heuristics: Float[np.ndarray, "M K"]
    chance: Float[np.ndarray, " M"]

    @classmethod
    def of(cls, texts: Sequence[LinkedWords], hits: np.ndarray) -> "_AlignmentSums":
        number = {text: row for row, text in enumerate(dict.fromkeys(text.text for text in texts))}
        rows = [number[text.text] for text in texts]

        def per_text(pieces: Any) -> np.ndarray:
            sums = np.zeros((len(number), *np.shape(pieces)[1:]))
            np.add.at(sums, rows, np.asarray(pieces, dtype=float))
            return sums

        return cls(
            right=per_text(hits),
            n=per_text([len(text.gold) for text in texts]),
            links=per_text([text.gold.sum() for text in texts]),
            heuristics=per_text([text.heuristic_hits() for text in texts]),
            chance=per_text([text.gold.mean(-1).sum() for text in texts]),
        )

    def frame(
        self, heads: Sequence[Head], query: Convention, number: int, seed: int
    ) -> pd.DataFrame:
        """The rows of one convention, by its number among those of these sums."""
        selection = halves(len(self.n), seed)
        held, right = ~selection, self.right[:, number]
        n, links = self.n[held].sum(), self.links[held].sum()
        count = np.broadcast_to(self.n[held, None], right[held].shape)
        low, high = ratio_interval(right[held], count, seed=seed)
        best = int(best_of(self.heuristics[selection, None, :-1], self.n[selection, None])[0])
        return pd.DataFrame(
            {
                "name": [str(head) for head in heads],
                "stack": [head.stack for head in heads],
                "layer": [head.layer for head in heads],
                "head": [head.head for head in heads],
                "query": query,
                "accuracy": right[held].sum(0) / n,
                "ci_low": low,
                "ci_high": high,
                "aer": 1 - 2 * right[held].sum(0) / (n + links),
                "chance": self.chance[held].sum() / n,
                "offset": self.heuristics[held, best].sum() / n,
                "diagonal": self.heuristics[held, -1].sum() / n,
                "n": n,
                "texts": int(held.sum()),
                "chosen_half": right[selection].sum(0) / max(1.0, self.n[selection].sum()),
            }
        )
