"""Word alignment by attention: accuracy and alignment error rate of every head."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.corpora import AnnotatedText, Corpus
from headwise.errors import ArgumentError, InputError
from headwise.models import device_of
from headwise.models.texts import batches, check_reads_text, context_of, pad, reads_two_texts
from headwise.roles._align import cross_attention, cross_heads, head_weights
from headwise.roles._hypotheses import best_of
from headwise.roles._samples import halves
from headwise.roles.relations import Item, TokenText, texts_of, tokenize
from headwise.roles.scores import Nodes, right_share
from headwise.tables import Head, address_columns, ratio_interval
from headwise.watch import Request, observe

CONVENTIONS = ("identity", "prediction")  # from a word to its source
_BATCH = 16  # texts per forward pass
_FARTHEST = 40  # words that an offset may reach back


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
    limit = context_of(model, tokenizer)
    scored = _score_pairs if reads_two_texts(model) else _score_texts
    heads, hits = scored(model, tokenizer, texts, limit)
    frames = [_frame(heads, query, of_query, seed) for query, of_query in hits.items()]
    return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True)
class LinkedWords:
    """The linked words of a text as `Q` queries, and their `S` candidates on the other side.

    Attributes:
        queries: The linked words: of the translation, or in the other direction of the source.
        candidates: The words before the translation, or those of the translation.
        gold: Which candidates each query is linked with.
        heuristics: The candidate that each heuristic names for each query, −1 for none: every
            offset, and last the diagonal.
    """

    text: AnnotatedText
    queries: Sequence[int]
    candidates: Sequence[int]
    gold: Bool[np.ndarray, "Q S"]
    heuristics: np.ndarray

    def hits(self, attention: Float[Tensor, "H Q S"]) -> Float[np.ndarray, " H"]:
        """The number of queries that each head aligns correctly; ties share."""
        return right_share(attention.numpy(), self.gold).sum(-1)

    def heuristic_hits(self) -> np.ndarray:
        """The number of correct queries of each heuristic."""
        named = self.gold[np.arange(len(self.gold))[:, None], self.heuristics]
        return (named & (self.heuristics >= 0)).sum(0)


# For each text, or piece of one: its linked words, and the correct queries of each head.
Hits = list[tuple[LinkedWords, np.ndarray]]


def linked_words(
    text: AnnotatedText, tokens: Sequence[Sequence[int]], queries: Collection[int]
) -> tuple[LinkedWords, LinkedWords] | None:
    """The linked words that have tokens, and the same in the other direction; None without any.

    Args:
        tokens: The tokens of each word.
        queries: The words that may be queries.
    """
    links: dict[int, set[int]] = {}
    for word, source in text.links:
        if source < word and tokens[source] and word in queries:
            links.setdefault(word, set()).add(source)
    if not links:
        return None
    begin, last = min(links), max(links)
    sources = [word for word in range(begin) if tokens[word]]
    words = [word for word in range(begin, len(tokens)) if tokens[word]]
    back: dict[int, set[int]] = {}
    for word, of_word in links.items():
        for source in sorted(of_word):
            back.setdefault(source, set()).add(word)
    there = [(word - begin) * len(sources) // (last - begin + 1) for word in links]
    back_again = [source * len(words) // begin for source in back]
    return (
        _linked(text, links, sources, -1, there),
        _linked(text, back, words, 1, back_again),
    )


def _linked(
    text: AnnotatedText,
    links: Mapping[int, Collection[int]],
    candidates: Sequence[int],
    side: int,
    diagonal: Sequence[int],
) -> LinkedWords:
    index = {word: number for number, word in enumerate(candidates)}
    offsets = [
        [index.get(query + side * offset, -1) for offset in range(1, _FARTHEST)] for query in links
    ]
    gold = np.array([[word in linked for word in candidates] for linked in links.values()])
    return LinkedWords(text, list(links), candidates, gold, np.column_stack([offsets, diagonal]))


@torch.no_grad()
def _score_texts(
    model: nn.Module, tokenizer: Any, texts: Sequence[AnnotatedText], limit: int
) -> tuple[list[Head], dict[str, Hits]]:
    """The correct queries of each head in each piece; `source` if some head looks ahead."""
    linked = []
    for piece in tokenize(tokenizer, texts, limit).pieces:
        tokens = piece.words
        queries = {word for word, of_word in enumerate(tokens) if of_word and of_word[0] > 0}
        if both := linked_words(piece.text, tokens, queries):
            # Every word, and the token before it.
            words = [*tokens, *([word[0] - 1] if word and word[0] else [] for word in tokens)]
            linked.append((*both, Item(piece.ids, {"token": (), "word": words, "mention": ()}, {})))
    _check_linked(linked, len(texts))
    # Pieces are batched by length; the sort is stable.
    linked.sort(key=lambda parts: len(parts[2].ids))
    hits: dict[str, Hits] = {name: [] for name in (*CONVENTIONS, "source")}
    heads: list[Head] = []
    done, looks_ahead = 0, False
    with in_evaluation(model), observe(model, Request(statistics=(), maps=True)) as watch:
        for batch in batches([item.ids for *_, item in linked], _BATCH, device_of(model)):
            rows = linked[done : done + len(batch.input_ids)]
            done += len(rows)
            nodes = Nodes("word", [item for *_, item in rows], batch.input_ids.shape[1])
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
            layers = watch.layers()
            heads = [head for layer in layers for head in layer.heads]
            folded = [
                nodes.fold(block.weights).cpu() for layer in layers for block in layer.blocks()
            ]
            for (there, back, item), weights in zip(rows, torch.cat(folded, dim=1), strict=True):
                n = len(item.nodes["word"]) // 2
                for name, of, first in (
                    ("identity", there, 0),
                    ("prediction", there, n),
                    ("source", back, 0),
                ):
                    rows_of = [first + word for word in of.queries]
                    hits[name].append((of, of.hits(weights[:, rows_of][..., list(of.candidates)])))
            looks_ahead |= any(bool(layer.visible.triu(1).any()) for layer in layers)
    if not looks_ahead:
        del hits["source"]
    return heads, hits


def _score_pairs(
    model: nn.Module, tokenizer: Any, texts: Sequence[AnnotatedText], limit: int
) -> tuple[Sequence[Head], dict[str, Hits]]:
    """The correct queries of each cross-attention head in each pair of texts."""
    linked = [text for text in texts if text.links]
    parts = [
        tokenize(tokenizer, part, limit).pieces
        for part in zip(*(_in_two(text) for text in linked), strict=True)
    ]
    if any(len(pieces) != len(linked) for pieces in parts):
        raise ArgumentError(
            f"alignment: a text or its translation is empty, or has more than {limit} tokens. "
            f"Leave it out, or shorten it."
        )
    pairs = []
    for text, source, target in zip(linked, *parts, strict=True):
        if words := _linked_pair(text, source, target):
            pairs.append((words, source, target))
    _check_linked(pairs, len(texts))
    pairs.sort(key=lambda pair: len(pair[1].ids))
    hits: dict[str, Hits] = {name: [] for name in CONVENTIONS}
    heads: Sequence[Head] = ()
    for start in range(0, len(pairs), _BATCH):
        batch = pairs[start : start + _BATCH]
        inputs = vars(pad([source.ids for _, source, _ in batch], device_of(model)))
        outputs = [target.ids for *_, target in batch]
        calls = cross_attention("alignment", model, inputs, outputs)
        heads = cross_heads(calls)
        of_heads = torch.stack([head_weights(calls, head) for head in heads], 1)
        for (words, source, target), weights in zip(batch, of_heads, strict=True):
            tokens = [*source.words, *target.words]
            keys = torch.stack([weights[..., tokens[w]].sum(-1) for w in words.candidates], -1)
            # The token itself is read one position after the one that predicts it.
            queries = {
                "identity": [[token + 1 for token in tokens[word]] for word in words.queries],
                "prediction": [tokens[word][:1] for word in words.queries],
            }
            for name, positions in queries.items():
                rows = torch.stack([keys[:, query].mean(1) for query in positions], 1)
                hits[name].append((words, words.hits(rows.float().cpu())))
    return heads, hits


def _linked_pair(text: AnnotatedText, source: TokenText, target: TokenText) -> LinkedWords | None:
    tokens, n_sources = [*source.words, *target.words], len(source.text.words)
    queries = {
        word
        for word, of_word in enumerate(target.words, n_sources)
        if of_word and of_word[-1] < len(target.ids) - 1
    }
    both = linked_words(text, tokens, queries)
    return both[0] if both else None


def _in_two(text: AnnotatedText) -> tuple[AnnotatedText, AnnotatedText]:
    """A text up to its translation, and the translation."""
    begin = text.translation or text.words[min(word for word, _ in text.links)][0]
    before = sum(end <= begin for _, end in text.words)
    target = tuple((start - begin, end - begin) for start, end in text.words[before:])
    return (
        AnnotatedText(text.text[:begin], text.words[:before]),
        AnnotatedText(text.text[begin:], target),
    )


def _check_linked(linked: Sequence[Any], n_texts: int) -> None:
    if not linked:
        raise InputError(
            f"alignment: no word of {n_texts} texts is linked with an earlier one. Give texts "
            f"with links, each source before its translation."
        )


def _frame(heads: Sequence[Head], query: str, hits: Hits, seed: int) -> pd.DataFrame:
    """The rows of one convention."""
    linked = [words for words, _ in hits]
    number = {text: row for row, text in enumerate(dict.fromkeys(words.text for words in linked))}

    def per_text(pieces: Any) -> np.ndarray:
        sums = np.zeros((len(number), *np.shape(pieces)[1:]))
        np.add.at(sums, [number[words.text] for words in linked], np.asarray(pieces, dtype=float))
        return sums

    right = per_text([of for _, of in hits])
    queries = per_text([len(words.gold) for words in linked])
    heuristics = per_text([words.heuristic_hits() for words in linked])
    selection = halves(len(number), seed)
    held = ~selection
    n, links = queries[held].sum(), per_text([words.gold.sum() for words in linked])[held].sum()
    chance = per_text([words.gold.mean(-1).sum() for words in linked])[held].sum()
    count = np.broadcast_to(queries[held, None], right[held].shape)
    low, high = ratio_interval(right[held], count, seed=seed)
    best = int(best_of(heuristics[selection, None, :-1], queries[selection, None])[0])
    return pd.DataFrame(
        {
            **address_columns(heads),
            "query": query,
            "accuracy": right[held].sum(0) / n,
            "ci_low": low,
            "ci_high": high,
            "aer": 1 - 2 * right[held].sum(0) / (n + links),
            "chance": chance / n,
            "offset": heuristics[held, best].sum() / n,
            "diagonal": heuristics[held, -1].sum() / n,
            "n": n,
            "texts": int(held.sum()),
            "chosen_half": right[selection].sum(0) / max(1.0, queries[selection].sum()),
        }
    )
