"""Word alignment by attention: accuracy and alignment error rate of every head."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.corpora import AnnotatedText, Corpus
from headwise.errors import ArgumentError, InputError
from headwise.models import device_of
from headwise.models.texts import check_reads_text, context_of, pad, reads_two_texts
from headwise.roles._align import cross_attention, cross_heads, head_weights
from headwise.roles._hypotheses import best_of
from headwise.roles._samples import halves, sums_by_text
from headwise.roles.relations import texts_of, tokenize
from headwise.roles.scores import right_share
from headwise.tables import Head, address_columns, ratio_interval
from headwise.watch import Request, observe

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
    read = _pairs if reads_two_texts(model) else _pieces
    passages = [of for of in read(tokenizer, texts, context_of(model, tokenizer)) if of[-1]]
    if not passages:
        raise InputError(
            f"alignment: no word of {len(texts)} texts is linked with an earlier one. Give texts "
            f"with links, each source before its translation."
        )
    passages.sort(key=lambda passage: len(passage[0]))  # so that there is little padding
    answers: dict[str, list[tuple[Question, Float[np.ndarray, " H"]]]] = {}
    heads: Sequence[Head] = ()
    looks_ahead = False
    for start in range(0, len(passages), _BATCH):
        batch = passages[start : start + _BATCH]
        heads, hits, ahead = _hits(model, batch)
        looks_ahead |= ahead
        asked = [question for *_, questions in batch for question in questions]
        for question, of_heads in zip(asked, hits, strict=True):
            answers.setdefault(question.convention, []).append((question, of_heads))
    if not looks_ahead:
        answers.pop("source", None)
    frames = [_frame(heads, convention, of, seed) for convention, of in answers.items()]
    return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True)
class Question:
    """Some linked words of a text, and the words of the other side that they may be aligned with.

    Attributes:
        convention: Which tokens attend: `identity`, `prediction` or `source`.
        queries: The tokens of each query.
        candidates: The tokens of each candidate.
        gold: Which candidates each query is linked with.
        heuristics: The candidate that each heuristic names for each query, −1 for none: every
            offset, and last the diagonal.
    """

    text: AnnotatedText
    convention: str
    queries: Sequence[Sequence[int]]
    candidates: Sequence[Sequence[int]]
    gold: Bool[np.ndarray, "Q C"]
    heuristics: Int[np.ndarray, "Q K"]

    def hits(self, weights: Float[Tensor, "h T S"]) -> Float[np.ndarray, " h"]:
        """The number of queries that each head aligns correctly; ties share."""
        (_, T, S), weights = weights.shape, weights.cpu()
        rows, columns = _members(self.queries, T), _members(self.candidates, S)
        rows = rows / rows.sum(1, keepdim=True)
        attention = rows.to(weights) @ weights @ columns.to(weights).T
        return right_share(attention.numpy(), self.gold).sum(-1)

    def heuristic_hits(self) -> Int[np.ndarray, " K"]:
        """The number of correct queries of each heuristic."""
        named = self.gold[np.arange(len(self.gold))[:, None], self.heuristics]
        return (named & (self.heuristics >= 0)).sum(0)


def _members(nodes: Sequence[Sequence[int]], size: int) -> Float[Tensor, "n size"]:
    """Which tokens belong to each node."""
    members = torch.zeros(len(nodes), size)
    for row, tokens in enumerate(nodes):
        members[row, list(tokens)] = 1.0
    return members


# The tokens that a model reads, those that its decoder reads (None without one), what is asked.
Passage = tuple[Sequence[int], Sequence[int] | None, list[Question]]


def _questions(
    text: AnnotatedText,
    tokens: Sequence[Sequence[int]],
    conventions: Mapping[str, Sequence[Sequence[int]]],
    n_sources: int | None = None,
) -> Iterator[Question]:
    """What is asked of the linked words of a text, under each convention; nothing without any.

    Args:
        tokens: The tokens of each word.
        conventions: The tokens that attend for each word. A word that has none is no query.
        n_sources: The number of words that the encoder reads. None where one model reads all
            words, and can be asked in the other direction too.
    """
    links: dict[int, set[int]] = {}
    back: dict[int, set[int]] = {}
    for word, source in text.links:
        if source < word and tokens[source] and all(of[word] for of in conventions.values()):
            links.setdefault(word, set()).add(source)
    if not links:
        return
    for word, of_word in links.items():
        for source in sorted(of_word):
            back.setdefault(source, set()).add(word)
    begin, last = min(links), max(links)
    sources = [word for word in range(n_sources or begin) if tokens[word]]
    words = [word for word in range(begin, len(tokens)) if tokens[word]]
    diagonal = [(word - begin) * len(sources) // (last - begin + 1) for word in links]
    candidates = [tokens[word] for word in sources]
    for name, of in conventions.items():
        truth = _truth(links, sources, -1, diagonal)
        yield Question(text, name, [of[word] for word in links], candidates, *truth)
    if n_sources is None:
        truth = _truth(back, words, 1, [source * len(words) // begin for source in back])
        queries, candidates = [tokens[word] for word in back], [tokens[word] for word in words]
        yield Question(text, "source", queries, candidates, *truth)


def _truth(
    links: Mapping[int, Collection[int]],
    candidates: Sequence[int],
    side: int,
    diagonal: Sequence[int],
) -> tuple[Bool[np.ndarray, "Q C"], Int[np.ndarray, "Q K"]]:
    """Which candidates are right, and which ones the heuristics name."""
    index = {word: number for number, word in enumerate(candidates)}
    offsets = [
        [index.get(query + side * offset, -1) for offset in range(1, _FARTHEST)] for query in links
    ]
    gold = np.array([[word in linked for word in candidates] for linked in links.values()])
    return gold, np.column_stack([offsets, diagonal])


def _pieces(tokenizer: Any, texts: Sequence[AnnotatedText], limit: int) -> Iterator[Passage]:
    """The texts, or their pieces, of a model that reads source and translation as one text."""
    for piece in tokenize(tokenizer, texts, limit).pieces:
        words = piece.words
        before = [[word[0] - 1] if word and word[0] else [] for word in words]
        conventions = {"identity": words, "prediction": before}
        yield piece.ids, None, [*_questions(piece.text, words, conventions)]


def _pairs(tokenizer: Any, texts: Sequence[AnnotatedText], limit: int) -> Iterator[Passage]:
    """The texts with their translations, for an encoder and a decoder."""
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
    for text, source, target in zip(linked, *parts, strict=True):
        unread: list[list[int]] = [[] for _ in source.words]
        conventions = {
            # The token itself is read one position after the one that predicts it.
            "identity": unread + [
                [token + 1 for token in word] if word and word[-1] < len(target.ids) - 1 else []
                for word in target.words
            ],
            "prediction": unread + [word[:1] for word in target.words],
        }  # fmt: skip
        questions = _questions(text, [*source.words, *target.words], conventions, len(unread))
        yield source.ids, target.ids, [*questions]


def _in_two(text: AnnotatedText) -> tuple[AnnotatedText, AnnotatedText]:
    """A text up to its translation, and the translation."""
    begin = text.translation or text.words[min(word for word, _ in text.links)][0]
    before = sum(end <= begin for _, end in text.words)
    target = tuple((start - begin, end - begin) for start, end in text.words[before:])
    return (
        AnnotatedText(text.text[:begin], text.words[:before]),
        AnnotatedText(text.text[begin:], target),
    )


@torch.no_grad()
def _hits(
    model: nn.Module, batch: Sequence[Passage]
) -> tuple[Sequence[Head], list[Float[np.ndarray, " H"]], bool]:
    """The heads, how many queries of each question they align, and whether one may look ahead."""

    def of_heads(blocks: Iterable[Float[Tensor, "B h T S"]]) -> list[Float[np.ndarray, " H"]]:
        parts = [
            [question.hits(block[row]) for row, (*_, of) in enumerate(batch) for question in of]
            for block in blocks
        ]
        return [np.concatenate(of_question) for of_question in zip(*parts, strict=True)]

    inputs = vars(pad([ids for ids, *_ in batch], device_of(model)))
    if outputs := [target for _, target, _ in batch if target is not None]:
        calls = cross_attention("alignment", model, inputs, outputs)
        heads = cross_heads(calls)
        return heads, of_heads(head_weights(calls, head)[:, None] for head in heads), True
    with in_evaluation(model), observe(model, Request(statistics=(), maps=True)) as watch:
        model(**inputs)
        layers = watch.layers()
        hits = of_heads(block.weights for layer in layers for block in layer.blocks())
    ahead = any(bool(layer.visible.triu(1).any()) for layer in layers)
    return [head for layer in layers for head in layer.heads], hits, ahead


def _frame(
    heads: Sequence[Head],
    convention: str,
    answers: Sequence[tuple[Question, Float[np.ndarray, " H"]]],
    seed: int,
) -> pd.DataFrame:
    """The rows of one convention."""
    questions, hits = zip(*answers, strict=True)
    number = {text: row for row, text in enumerate(dict.fromkeys(q.text for q in questions))}
    text_of = np.array([number[question.text] for question in questions])

    def per_text(pieces: Any) -> np.ndarray:
        return sums_by_text(np.asarray(pieces, dtype=float), text_of, len(number))

    right = per_text(hits)
    queries = per_text([len(question.gold) for question in questions])
    links = per_text([question.gold.sum() for question in questions])
    chances = per_text([question.gold.mean(-1).sum() for question in questions])
    heuristics = per_text([question.heuristic_hits() for question in questions])
    selection = halves(len(number), seed)
    held = ~selection
    n = queries[held].sum()
    count = np.broadcast_to(queries[held, None], right[held].shape)
    low, high = ratio_interval(right[held], count, seed=seed)
    best = int(best_of(heuristics[selection, None, :-1], queries[selection, None])[0])
    return pd.DataFrame(
        {
            **address_columns(heads),
            "query": convention,
            "accuracy": right[held].sum(0) / n,
            "ci_low": low,
            "ci_high": high,
            "aer": 1 - 2 * right[held].sum(0) / (n + links[held].sum()),
            "chance": chances[held].sum() / n,
            "offset": heuristics[held, best].sum() / n,
            "diagonal": heuristics[held, -1].sum() / n,
            "n": n,
            "texts": int(held.sum()),
            "chosen_half": right[selection].sum(0) / max(1.0, queries[selection].sum()),
        }
    )
