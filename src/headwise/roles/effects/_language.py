"""Behaviours of language models: agreement, translation, repetition."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.corpora import (
    AnnotatedText,
    Choice,
    Corpus,
    Several,
    Texts,
    list_corpus,
    list_items,
    list_texts,
)
from headwise.errors import ArgumentError, InputError
from headwise.models import batches, context_of, in_evaluation
from headwise.roles.effects._behaviour import Behaviour, Question, check_predicts, logits_of
from headwise.roles.relations import INDUCTION, TokenText, probe, tokenize

_BATCH = 32  # texts that the model reads at once
_ANY = 10**9  # tokens: texts are not cut
_AGREEING = ("next subject", "head → nsubj")
_TRANSLATING = ("translation", "next translation")
_REPEATING = ("previous token", "same token", "induction")


def agreement(
    model: nn.Module, tokenizer: Any, choices: Several[Choice], *, name: str = "agreement"
) -> Behaviour:
    """How often the model prefers the wrong one of two words: `p(wrong) / (p(right) + p(wrong))`.

    Words that begin with the same tokens are judged by the first tokens that differ.

    Args:
        model: A causal language model.
        choices: One for each text: `headwise.corpora.choices` draws them from the grammar, with
            an adverb between subject and verb or without. Two such behaviours need two names.
    Raises:
        ArgumentError: there is no choice, or something is not a choice.
        InputError: two words are the same or one begins with the other as tokens, or a choice
            is longer than the model reads.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    listed = list_items("agreement", "choices", choices, Choice)
    rows = _choosing(tokenizer, listed, context_of(model, tokenizer))
    says = "p(wrong) / (p(right) + p(wrong)), from 0 to 1"
    return Behaviour(name, says, _ask(model, rows, _Chosen), _AGREEING)


def translation(model: nn.Module, tokenizer: Any, corpus: Corpus) -> Behaviour:
    """How badly the model predicts words that translate earlier ones: nats per token of them.

    Args:
        model: A causal language model.
        corpus: Texts with links, each source before its translation.
    Raises:
        ArgumentError: no text has such a link, or something is not a text.
        InputError: a word is longer than the model reads.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    texts = list(dict.fromkeys(list_corpus("translation", corpus)))
    pieces = tokenize(tokenizer, texts, context_of(model, tokenizer)).pieces
    rows = [(list(one.ids), asked) for one in pieces if (asked := _translated(one))]
    says = "nats per token of the words that translate another"
    return Behaviour("translation", says, _ask(model, rows, _Predicted), _TRANSLATING)


def repetition(
    model: nn.Module, tokenizer: Any, texts: Texts, *, sequences: int = 100, seed: int = 1
) -> Behaviour:
    """How badly the model predicts the second occurrence of a random sequence: nats per token.

    Each sequence has a period of its own after a prefix of its own; see `find_roles`, which
    draws others unless it is given the same seed.

    Args:
        model: A causal language model.
        texts: Where the tokens are from; a string is one text.
    Raises:
        ArgumentError: the texts have too few different tokens, or the context is too short.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    limit = context_of(model, tokenizer)
    annotated = [AnnotatedText(text) for text in list_texts("repetition", texts)]
    pieces = tokenize(tokenizer, annotated, limit).pieces
    repeated = probe(pieces, limit, sequences, seed)[0] if pieces else []
    rows = []
    for one in repeated:
        queries = [at for at, _ in one.pairs[INDUCTION.name]]
        second = [at + 1 for at in set(queries) if queries.count(at) == 1]
        rows.append((list(one.ids), sorted(at for at in second if at < len(one.ids))))
    says = "nats per token of the second occurrence"
    return Behaviour("repetition", says, _ask(model, rows, _Predicted), _REPEATING)


Row = tuple[list[int], list[int]]  # the tokens of a text, and what is asked about it


class _Predicted:
    """The mean over the asked tokens of a text of how unlikely the model found them."""

    def __init__(self, model: nn.Module, ids: Tensor, asked: Sequence[Sequence[int]]) -> None:
        self._model, self._ids = model, ids
        self._asked = torch.zeros_like(ids, dtype=torch.bool)
        for row, places in enumerate(asked):
            self._asked[row, list(places)] = True

    def __call__(self, output: Any) -> Tensor:
        logits = logits_of(output, self._model)[:, :-1].float()
        losses = functional.cross_entropy(logits.mT, self._ids[:, 1:], reduction="none")
        asked = self._asked[:, 1:].to(losses)
        return (losses * asked).sum(1) / asked.sum(1)


class _Chosen:
    """The share that the wrong token has of what the model gives to it and the right one."""

    def __init__(self, model: nn.Module, ids: Tensor, asked: Sequence[Sequence[int]]) -> None:
        self._model, self._asked = model, torch.tensor(asked, device=ids.device)

    def __call__(self, output: Any) -> Tensor:
        last, right, wrong = self._asked.unbind(-1)
        rows = torch.arange(len(last), device=last.device)
        logits = logits_of(output, self._model)[rows, last].float()
        return (logits[rows, wrong] - logits[rows, right]).sigmoid()


def _ask(
    model: nn.Module, rows: Sequence[Row], judge: type[_Predicted] | type[_Chosen]
) -> list[Question]:
    """The questions of some texts, those of about equal length together."""
    if not rows:
        raise ArgumentError(
            f"behaviour: none of these texts asks {type(model).__name__} for anything. "
            f"Give texts with what is to be judged."
        )
    ordered = sorted(rows, key=lambda row: len(row[0]))
    with in_evaluation(model):
        check_predicts(model, ordered[-1][0])
    device = next(model.parameters()).device
    questions, done = [], 0
    for batch in batches([ids for ids, _ in ordered], _BATCH, device):
        asked = [one for _, one in ordered[done : done + len(batch.input_ids)]]
        done += len(asked)
        questions.append(Question(vars(batch), judge(model, batch.input_ids, asked)))
    return questions


def _translated(text: TokenText) -> list[int]:
    """The tokens of words whose source stands before them in the same piece."""
    words = text.words
    found = {
        at
        for one, source in text.text.links
        if one > source and words[source]
        for at in words[one]
        if at
    }
    return sorted(found)


def _choosing(tokenizer: Any, choices: Sequence[Choice], limit: int) -> list[Row]:
    """Each beginning with the tokens that its words share, and the first two that differ."""
    texts = [f"{one.before} {word}" for one in choices for word in (one.right, one.wrong)]
    read = [
        _inside(piece) for piece in tokenize(tokenizer, [*map(AnnotatedText, texts)], _ANY).pieces
    ]
    rows = []
    for one, right, wrong in zip(choices, read[::2], read[1::2], strict=True):
        pairs = enumerate(zip(right, wrong, strict=False))
        shared = next((at for at, (this, that) in pairs if this != that), 0)
        if not 0 < shared <= limit:
            raise InputError(
                f"agreement: {one.right!r} and {one.wrong!r} after {one.before[-30:]!r} do not "
                f"part at a token of the first {limit}. Give two words of which none begins with "
                f"the other, after fewer words."
            )
        rows.append((right[:shared], [shared - 1, right[shared], wrong[shared]]))
    return rows


def _inside(piece: TokenText) -> list[int]:
    """The tokens without special ones after the last that is text."""
    last = max(at for at, special in enumerate(piece.special) if not special)
    return list(piece.ids[: last + 1])
