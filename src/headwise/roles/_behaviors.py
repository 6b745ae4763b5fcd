"""Behaviors of a model, one loss per text, lower is better: of language models, or your own."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

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
from headwise.errors import ArgumentError, InputError, UnsupportedError
from headwise.models import device_of
from headwise.models.texts import batches as padded_batches
from headwise.models.texts import context_of, tokenizer_of
from headwise.ownership import batches_of, logits_of
from headwise.roles.relations import (
    NEXT_NAME,
    PREFIX_MATCHING,
    Item,
    TokenText,
    next_names,
    probe,
    tokenize,
)
from headwise.scoring import token_losses

_BATCH = 32  # texts per forward pass
_UNLIMITED = 10**9  # tokens: texts are not cut
Inputs = Mapping[str, Any]
Row = tuple[list[int], list[int]]  # the tokens of a text, and its targets
Loss = Callable[[Any], Tensor]  # from the output of a model to one loss per text
_AGREEING = ("next subject", "head → nsubj")
_TRANSLATING = ("translation → source", "next translation")
_REPEATING = ("previous token", "same token", PREFIX_MATCHING.name)
_INDUCTION = {PREFIX_MATCHING.name: "induction"}
_MOVING = {NEXT_NAME: "name moving"}


@dataclass(frozen=True)
class BehaviorBatch:
    """A batch of texts and the loss that measures a behavior on it.

    Attributes:
        inputs: The model's keyword arguments.
        loss: Maps the model's output to one loss per text.
    """

    inputs: Inputs
    loss: Callable[[Any], Float[Tensor, " B"]]


@dataclass(frozen=True)
class Behavior:
    """Something that a model does, measured by a loss, and the roles that may contribute to it.

    `agreement`, `translation`, `induction`, `name_moving` and `behavior` make one.

    Attributes:
        name: Its name in tables.
        says: What the loss of a text is, with its unit.
        batches: The inputs and the loss.
        roles: The roles whose rows show its effects.
        labels: By role, what a head with the role is called if the behavior needs it.
        control: The same number of texts without the behavior, on which a head that has it
            costs little.
    Raises:
        ArgumentError: there is no batch.
    """

    name: str
    says: str
    batches: Sequence[BehaviorBatch]
    roles: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    control: Sequence[BehaviorBatch] = ()

    def __post_init__(self) -> None:
        if not self.batches:
            raise ArgumentError(
                f"Behavior: {self.name!r} has no batch of texts. Give texts that show it."
            )
        if self.labels and not self.control:
            raise ArgumentError(
                f"Behavior: {self.name!r} has labels {dict(self.labels)} and no control. Give "
                f"texts without the behavior as its control."
            )


def behavior(
    name: str,
    batches: Several[Inputs],
    loss: Callable[[Any, Inputs], Tensor],
    *,
    roles: Sequence[str] = (),
    says: str = "a loss of your own",
    labels: Mapping[str, str] | None = None,
    control: Several[Inputs] = (),
) -> Behavior:
    """A behavior of your own: its loss maps the model's output and the batch to one loss per text.

    Args:
        batches: The model's inputs by name, as for `headwise.importance`.
        loss: Lower is better.
        roles: The roles that it may depend on.
        labels: By role, what a head with the role is called if the behavior needs it and its
            control does not: `{"to the verb": "agreement"}`.
        control: As many texts without the behavior, in the same order, with the same loss.
    Raises:
        ArgumentError: there is no batch, one is a text, or there are labels without a control.
    """

    def loss_of(batch: Inputs) -> Loss:
        return lambda output: loss(output, batch)

    scored, controls = (
        [BehaviorBatch(batch, loss_of(batch)) for batch in listed]
        for listed in (
            batches_of(batches, "behavior", "batches"),
            batches_of(control, "behavior", "control") if control else [],
        )
    )
    roles = tuple(dict.fromkeys([*roles, *(labels or {})]))
    return Behavior(name, says, scored, roles, labels or {}, controls)


def agreement(
    model: nn.Module, choices: Several[Choice], *, tokenizer: Any = None, name: str = "agreement"
) -> Behavior:
    """The probability of the wrong one of two words: `p(wrong) / (p(right) + p(wrong))`.

    Words that begin with the same tokens are compared at the first tokens that differ.

    Args:
        model: A causal language model.
        choices: One for each text: `headwise.corpora.choices` draws them from the grammar, with
            an adverb between subject and verb or without. Two such behaviors need two names.
        tokenizer: Its tokenizer, a fast one.
    Raises:
        ArgumentError: there is no choice, or something is not a choice.
        InputError: the tokens of one word begin with those of the other, or a choice does not
            fit into the model's context.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    tokenizer = tokenizer_of(model, tokenizer, "agreement")
    listed = list(dict.fromkeys(list_items("agreement", "choices", choices, Choice)))
    rows = _choosing(tokenizer, listed, context_of(model, tokenizer))
    says = "p(wrong) / (p(right) + p(wrong)), from 0 to 1"
    return Behavior(name, says, _batches(model, rows, _wrong_share), _AGREEING)


def translation(model: nn.Module, texts: Corpus, *, tokenizer: Any = None) -> Behavior:
    """The loss on words that translate earlier words, in nats per token.

    Args:
        model: A causal language model.
        texts: Texts with links, each source before its translation.
        tokenizer: Its tokenizer, a fast one.
    Raises:
        ArgumentError: no text has such a link, or something is not a text.
        InputError: a word is longer than the model's context.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    tokenizer = tokenizer_of(model, tokenizer, "translation")
    distinct = list(dict.fromkeys(list_corpus("translation", texts)))
    pieces = tokenize(tokenizer, distinct, context_of(model, tokenizer)).pieces
    rows = [(list(piece.ids), targets) for piece in pieces if (targets := _translated(piece))]
    says = "nats per token of the words that translate another"
    return Behavior("translation", says, _batches(model, rows, _nats), _TRANSLATING)


def induction(
    model: nn.Module,
    texts: Texts,
    *,
    tokenizer: Any = None,
    sequences: int = 100,
    seed: int = 1,
) -> Behavior:
    """The loss on the second occurrence of a random sequence, in nats per token.

    Each sequence has a random prefix and a random period. `find_roles` draws other sequences
    unless it gets the same seed. The control has other random tokens in the same places, so that
    a head with the role `prefix matching` is called `induction` if the loss grows without it,
    and hardly on the control.

    Args:
        model: A causal language model.
        texts: The source of the tokens; a string is one text.
        tokenizer: Its tokenizer, a fast one.
    Raises:
        ArgumentError: the texts have too few different tokens, or the context is too short.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    tokenizer = tokenizer_of(model, tokenizer, "induction")
    limit = context_of(model, tokenizer)
    annotated = [AnnotatedText(text) for text in list_texts("induction", texts)]
    pieces = tokenize(tokenizer, annotated, limit).pieces
    drawn = probe(pieces, limit, sequences, seed) if pieces else ([], [])
    says = "nats per token of the second occurrence"
    batches, control = (_batches(model, list(map(_second, part)), _nats) for part in drawn)
    return Behavior("induction", says, batches, _REPEATING, _INDUCTION, control)


def name_moving(
    model: nn.Module, texts: Corpus, *, tokenizer: Any = None, seed: int = 1
) -> Behavior:
    """The loss on a name that has to follow, because another one repeats, in nats per token.

    *When Mary and John went to the store, John gave a drink to* is followed by the name that does
    not repeat. The control has another name there, of as many tokens, which the text does not
    mention: the same names stand before it, and neither can be moved to it. So a head with the
    role `next name`, which attends to the right one of the names, is called `name moving` if the
    loss grows without it, and hardly on the control. A text without such a name, or without
    another one for its control, is left out.

    Args:
        model: A causal language model.
        texts: Texts with mentions: `headwise.corpora.name_texts` draws them.
        tokenizer: Its tokenizer, a fast one.
        seed: The seed of the names of the control.
    Raises:
        ArgumentError: no text has such a name, or something is not a text.
        UnsupportedError: the model does not predict next tokens, or its tokenizer is slow.
    """
    tokenizer = tokenizer_of(model, tokenizer, "name_moving")
    distinct = list(dict.fromkeys(list_corpus("name_moving", texts)))
    pieces = tokenize(tokenizer, distinct, context_of(model, tokenizer)).pieces
    rows = _with_other_names(pieces, np.random.default_rng(seed))
    says = "nats per token of the name that has to follow"
    batches, control = (_batches(model, part, _nats) for part in rows)
    return Behavior("name moving", says, batches, (NEXT_NAME,), _MOVING, control)


def _choosing(tokenizer: Any, choices: Sequence[Choice], limit: int) -> list[Row]:
    """The shared tokens of each choice, and the first two tokens that differ."""
    texts = [
        AnnotatedText(f"{choice.before} {word}")
        for choice in choices
        for word in (choice.right, choice.wrong)
    ]
    ids = []
    for piece in tokenize(tokenizer, texts, _UNLIMITED).pieces:
        last = max(position for position, special in enumerate(piece.special) if not special)
        ids.append(list(piece.ids[: last + 1]))  # without what ends the text
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


def _second(item: Item) -> Row:
    """The tokens of a sequence, and the places of the second occurrence."""
    copies = Counter(query for query, _ in item.pairs[PREFIX_MATCHING.name])
    second = [query + 1 for query, n in copies.items() if n == 1 and query + 1 < len(item.ids)]
    return list(item.ids), sorted(second)


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


def _batches(
    model: nn.Module,
    rows: Sequence[Row],
    loss: Callable[[nn.Module, Tensor, Sequence[Sequence[int]]], Loss],
) -> list[BehaviorBatch]:
    """The batches of a behavior, with texts of about equal length together."""
    if not rows:
        raise ArgumentError(
            f"behavior: none of these texts has a target for {type(model).__name__}. "
            f"Give texts that show the behavior."
        )
    ordered = sorted(rows, key=lambda row: len(row[0]))
    with in_evaluation(model):
        _check_predicts(model, ordered[-1][0])
    scored, done = [], 0
    for batch in padded_batches([ids for ids, _ in ordered], _BATCH, device_of(model)):
        targets = [target for _, target in ordered[done : done + len(batch["input_ids"])]]
        done += len(targets)
        scored.append(BehaviorBatch(batch, loss(model, batch["input_ids"], targets)))
    return scored


def _nats(model: nn.Module, ids: Tensor, targets: Sequence[Sequence[int]]) -> Loss:
    """The mean cross-entropy of the target tokens of a text."""
    is_target = torch.zeros_like(ids, dtype=torch.bool)
    for row, positions in enumerate(targets):
        is_target[row, list(positions)] = True

    def loss(output: Any) -> Tensor:
        logits = _logits_of(output, model)[:, :-1].float()
        losses = token_losses(logits, ids[:, 1:])
        mask = is_target[:, 1:].to(losses)
        return (losses * mask).sum(1) / mask.sum(1)

    return loss


def _wrong_share(model: nn.Module, ids: Tensor, targets: Sequence[Sequence[int]]) -> Loss:
    """The probability of the wrong token, normalized over the right and the wrong one."""
    last, right, wrong = torch.tensor(targets, device=ids.device).unbind(-1)
    rows = torch.arange(len(last), device=ids.device)

    def loss(output: Any) -> Tensor:
        logits = _logits_of(output, model)[rows, last].float()
        return (logits[rows, wrong] - logits[rows, right]).sigmoid()

    return loss


def _logits_of(output: Any, model: nn.Module) -> Float[Tensor, "B T V"]:
    """The next-token logits of a language model's output."""
    logits = logits_of(output)
    if logits is None or logits.ndim != 3:
        raise UnsupportedError(
            f"behavior: {type(model).__name__} gives no logits for each token. Open a language "
            f"model with its language-model head, or define a behavior of your own."
        )
    return logits


@torch.no_grad()
def _check_predicts(model: nn.Module, ids: Sequence[int]) -> None:
    """Refuse a model whose logits depend on later tokens, because they reveal the target."""
    changed = next(token for token in (*ids, 0, 1) if token != ids[-1])
    batch = torch.tensor([[*ids], [*ids[:-1], changed]], device=device_of(model))
    logits = _logits_of(model(input_ids=batch, attention_mask=torch.ones_like(batch)), model)
    before = logits[:, :-1].float()
    if not torch.allclose(before[0], before[1], rtol=1e-3, atol=1e-3):
        raise UnsupportedError(
            f"behavior: {type(model).__name__} looks ahead, so it sees the token that it "
            f"should predict. Give a causal model, or define a behavior of your own."
        )
