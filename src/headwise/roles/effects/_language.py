"""Behaviours of language models: agreement, translation, repetition, name moving."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise._evaluation import in_evaluation
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
from headwise.models import device_of
from headwise.models.texts import (
    batches,
    context_of,
)
from headwise.roles.effects._behaviour import Behaviour, BehaviourBatch, check_predicts, logits_of
from headwise.roles.relations import (
    NEXT_NAME,
    PREFIX_MATCHING,
    Item,
    TokenText,
    next_names,
    probe,
    tokenize,
)

_BATCH = 32  # texts per forward pass
_UNLIMITED = 10**9  # tokens: texts are not cut
Row = tuple[list[int], list[int]]  # the tokens of a text, and its targets
_AGREEING = ("next subject", "head → nsubj")
_TRANSLATING = ("translation → source", "next translation")
_REPEATING = ("previous token", "same token", PREFIX_MATCHING.name)
_INDUCTION = {PREFIX_MATCHING.name: "induction"}
_MOVING = {NEXT_NAME: "name moving"}


def agreement(
    model: nn.Module, tokenizer: Any, choices: Several[Choice], *, name: str = "agreement"
) -> Behaviour:
    """The probability of the wrong one of two words: `p(wrong) / (p(right) + p(wrong))`.

    Words that begin with the same tokens are compared at the first tokens that differ.

    Args:
        model: A causal language model.
        choices: One for each text: `headwise.corpora.choices` draws them from the grammar, with
            an adverb between subject and verb or without. Two such behaviours need two names.
    Raises:
        ArgumentError: there is no choice, or something is not a choice.
        InputError: the tokens of one word begin with those of the other, or a choice does not
            fit into the model's context.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    listed = list_items("agreement", "choices", choices, Choice)
    rows = _choosing(tokenizer, listed, context_of(model, tokenizer))
    says = "p(wrong) / (p(right) + p(wrong)), from 0 to 1"
    return Behaviour(name, says, _batches(model, rows, _Chosen), _AGREEING)


def translation(model: nn.Module, tokenizer: Any, corpus: Corpus) -> Behaviour:
    """The loss on words that translate earlier words, in nats per token.

    Args:
        model: A causal language model.
        corpus: Texts with links, each source before its translation.
    Raises:
        ArgumentError: no text has such a link, or something is not a text.
        InputError: a word is longer than the model's context.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    texts = list(dict.fromkeys(list_corpus("translation", corpus)))
    pieces = tokenize(tokenizer, texts, context_of(model, tokenizer)).pieces
    rows = [(list(piece.ids), targets) for piece in pieces if (targets := _translated(piece))]
    says = "nats per token of the words that translate another"
    return Behaviour("translation", says, _batches(model, rows, _Predicted), _TRANSLATING)


def repetition(
    model: nn.Module, tokenizer: Any, texts: Texts, *, sequences: int = 100, seed: int = 1
) -> Behaviour:
    """The loss on the second occurrence of a random sequence, in nats per token.

    Each sequence has a random prefix and a random period. `find_roles` draws other sequences
    unless it gets the same seed. The control has other random tokens in the same places, so that
    a head with the role `prefix matching` is called `induction` if the loss grows without it,
    and hardly on the control.

    Args:
        model: A causal language model.
        texts: The source of the tokens; a string is one text.
    Raises:
        ArgumentError: the texts have too few different tokens, or the context is too short.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    limit = context_of(model, tokenizer)
    annotated = [AnnotatedText(text) for text in list_texts("repetition", texts)]
    pieces = tokenize(tokenizer, annotated, limit).pieces
    repeated, controls = probe(pieces, limit, sequences, seed) if pieces else ([], [])
    says = "nats per token of the second occurrence"
    batches, control = (
        _batches(model, [_second(item) for item in items], _Predicted)
        for items in (repeated, controls)
    )
    return Behaviour("repetition", says, batches, _REPEATING, _INDUCTION, control)


def _second(item: Item) -> Row:
    """The tokens of a sequence, and the places of the second occurrence."""
    queries = [query for query, _ in item.pairs[PREFIX_MATCHING.name]]
    second = [query + 1 for query in set(queries) if queries.count(query) == 1]
    return list(item.ids), sorted(target for target in second if target < len(item.ids))


def name_moving(model: nn.Module, tokenizer: Any, corpus: Corpus, *, seed: int = 1) -> Behaviour:
    """The loss on a name that has to follow, because another one repeats, in nats per token.

    *When Mary and John went to the store, John gave a drink to* is followed by the name that does
    not repeat. The control has another name there, of as many tokens, which the text does not
    mention: the same names stand before it, and neither can be moved to it. So a head with the
    role `next name`, which attends to the right one of the names, is called `name moving` if the
    loss grows without it, and hardly on the control. A text without such a name, or without
    another one for its control, is left out.

    Args:
        model: A causal language model.
        corpus: Texts with mentions: `headwise.corpora.name_texts` draws them.
        seed: The seed of the names of the control.
    Raises:
        ArgumentError: no text has such a name, or something is not a text.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    texts = list(dict.fromkeys(list_corpus("name_moving", corpus)))
    pieces = tokenize(tokenizer, texts, context_of(model, tokenizer)).pieces
    rows, controls = _with_other_names(pieces, np.random.default_rng(seed))
    says = "nats per token of the name that has to follow"
    batches, control = (_batches(model, part, _Predicted) for part in (rows, controls))
    return Behaviour("name moving", says, batches, (NEXT_NAME,), _MOVING, control)


def _with_other_names(
    pieces: Sequence[TokenText], rng: np.random.Generator
) -> tuple[list[Row], list[Row]]:
    """The tokens of each text up to the name that has to follow, and with another name there."""
    places: list[tuple[TokenText, list[int]]] = []
    tokens_of: dict[str, list[int]] = {}
    for piece in pieces:
        *_, last = [None, *next_names(piece)]
        if last is not None:
            mention = piece.text.mentions[last[0]]
            tokens = piece.tokens_in((mention.start, mention.end))
            name = piece.text.text[mention.start : mention.end]
            tokens_of.setdefault(name, [piece.ids[n] for n in tokens])
            places.append((piece, tokens))
    rows, controls = [], []
    for piece, tokens in places:
        absent = [
            ids
            for name, ids in tokens_of.items()
            if name not in piece.text.text and len(ids) == len(tokens)
        ]
        if absent:
            before = list(piece.ids[: tokens[0]])
            rows.append(([*before, *(piece.ids[n] for n in tokens)], tokens))
            controls.append(([*before, *absent[rng.integers(len(absent))]], tokens))
    return rows, controls


class _Predicted:
    """The mean cross-entropy of the target tokens of a text."""

    def __init__(self, model: nn.Module, ids: Tensor, targets: Sequence[Sequence[int]]) -> None:
        self._model, self._ids = model, ids
        self._mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, positions in enumerate(targets):
            self._mask[row, list(positions)] = True

    def __call__(self, output: Any) -> Tensor:
        logits = logits_of(output, self._model)[:, :-1].float()
        losses = functional.cross_entropy(logits.mT, self._ids[:, 1:], reduction="none")
        mask = self._mask[:, 1:].to(losses)
        return (losses * mask).sum(1) / mask.sum(1)


class _Chosen:
    """The probability of the wrong token, normalised over the right and the wrong one."""

    def __init__(self, model: nn.Module, ids: Tensor, targets: Sequence[Sequence[int]]) -> None:
        self._model, self._targets = model, torch.tensor(targets, device=ids.device)

    def __call__(self, output: Any) -> Tensor:
        last, right, wrong = self._targets.unbind(-1)
        rows = torch.arange(len(last), device=last.device)
        logits = logits_of(output, self._model)[rows, last].float()
        return (logits[rows, wrong] - logits[rows, right]).sigmoid()


def _batches(
    model: nn.Module, rows: Sequence[Row], loss: type[_Predicted] | type[_Chosen]
) -> list[BehaviourBatch]:
    """The batches of a behaviour, with texts of about equal length together."""
    if not rows:
        raise ArgumentError(
            f"behaviour: none of these texts has a target for {type(model).__name__}. "
            f"Give texts that show the behaviour."
        )
    ordered = sorted(rows, key=lambda row: len(row[0]))
    with in_evaluation(model):
        check_predicts(model, ordered[-1][0])
    device = device_of(model)
    scored, done = [], 0
    for batch in batches([ids for ids, _ in ordered], _BATCH, device):
        targets = [target for _, target in ordered[done : done + len(batch.input_ids)]]
        done += len(targets)
        scored.append(BehaviourBatch(vars(batch), loss(model, batch.input_ids, targets)))
    return scored


def _translated(text: TokenText) -> list[int]:
    """The tokens of words whose source stands before them in the same piece."""
    words = text.words
    targets = {
        token
        for word, source in text.text.links
        if word > source and words[source]
        for token in words[word]
        if token
    }
    return sorted(targets)


def _choosing(tokenizer: Any, choices: Sequence[Choice], limit: int) -> list[Row]:
    """The shared tokens of each choice, and the first two tokens that differ."""
    texts = [
        AnnotatedText(f"{choice.before} {word}")
        for choice in choices
        for word in (choice.right, choice.wrong)
    ]
    ids = [_without_end(piece) for piece in tokenize(tokenizer, texts, _UNLIMITED).pieces]
    rows = []
    for choice, right, wrong in zip(choices, ids[::2], ids[1::2], strict=True):
        pairs = enumerate(zip(right, wrong, strict=False))
        shared = next((position for position, (a, b) in pairs if a != b), 0)
        if not 0 < shared <= limit:
            raise InputError(
                f"agreement: {choice.right!r} and {choice.wrong!r} after {choice.before[-30:]!r} "
                f"do not differ within the first {limit} tokens. Give two words of which neither "
                f"begins with the other, after fewer words."
            )
        rows.append((right[:shared], [shared - 1, right[shared], wrong[shared]]))
    return rows


def _without_end(piece: TokenText) -> list[int]:
    """The tokens without the special tokens that end the text."""
    last = max(position for position, special in enumerate(piece.special) if not special)
    return list(piece.ids[: last + 1])
