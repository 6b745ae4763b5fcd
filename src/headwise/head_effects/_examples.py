"""Examples as token ids: where logits are read, and which are compared."""

from collections.abc import Sequence
from numbers import Integral
from reprlib import repr as shortened
from typing import Any, TypeAlias

import torch
from torch import nn

from headwise._display import counted
from headwise.corpora import Several, list_items
from headwise.errors import ArgumentError, InputError
from headwise.head_effects._direct import MEAN, Batch
from headwise.models import device_of
from headwise.models.texts import check_ids, context_of, pad, token_offsets, without_logits
from headwise.shapes import is_size

# A text, the word or token that is right to follow it, and another one; None is the mean logit.
Examples: TypeAlias = Several[tuple[str, str, str | None] | tuple[Sequence[int], int, int | None]]
Read = tuple[list[int], int, int]  # token ids, and the ids of the compared tokens
SIZE = 16  # examples of a batch


def read_examples(
    examples: Examples, tokenizer: Any, model: nn.Module
) -> tuple[list[Read], tuple[str, ...]]:
    """The tokens before the answers of each example, and the first tokens that differ; and notes
    on copies, and on answers that follow their text without a space.

    Examples that are the same count once. They are in the order of their lengths, which keeps
    padding short.

    Raises:
        ArgumentError: an example is malformed, or a text comes without a tokenizer.
        InputError: neither answer of an example goes on where the other one differs, or it is
            longer than the model's context.
    """
    listed: list[Any] = list_items("effects", "examples", examples, tuple)
    limit = context_of(model, tokenizer)
    read = []
    for number, example in enumerate(listed):
        where = f"effects: examples[{number}]"
        if len(example) != 3:
            raise ArgumentError(
                f"{where} is {shortened(example)}. Give (text, right, other); other is None for "
                f"the mean of all logits."
            )
        text, right, other = example
        kind: type = str if isinstance(text, str) else Integral
        if not isinstance(right, kind) or not isinstance(other, kind | None):
            raise ArgumentError(
                f"{where} has the answers {right!r} and {other!r}. Give texts after a text, and "
                f"token ids after token ids."
            )
        one = (_of_text if kind is str else _of_ids)(where, tokenizer, *example)
        if len(one[0]) > limit:
            raise InputError(
                f"{where} has {len(one[0]):,} tokens, and {type(model).__name__} reads {limit:,}. "
                f"Shorten it."
            )
        check_ids(where, (*one[0], one[1], max(0, one[2])), model)
        read.append(one)
    if not read:
        raise ArgumentError("effects: 0 examples. Give 20 or more.")
    distinct = {(*one[0], *one[1:]): one for one in read}
    continued = sum(
        bool(text[-1:].strip()) and any(answer[:1].isalnum() for answer in answers if answer)
        for text, *answers in listed
        if isinstance(text, str)
    )
    copies = len(read) - len(distinct)
    copied = f"{counted(copies, 'example')} left out: the same as another one"
    note = (
        f"in {counted(continued, 'example')} an answer follows the text without a space: begin it "
        f"with one, as in ' Mary', if it is a word of its own"
    )
    notes = (*[copied] * bool(copies), *[note] * bool(continued))
    return sorted(distinct.values(), key=lambda one: len(one[0])), notes


def _of_ids(where: str, _: Any, text: Sequence[Any], right: Any, other: Any) -> Read:
    ids = [*text]
    if not ids or not all(is_size(token + 1) for token in (*ids, right, other or 0)):
        raise ArgumentError(
            f"{where} is {shortened((ids, right, other))}. Give token ids from 0 on, one or more "
            f"before the answers."
        )
    if right == other:
        raise InputError(f"{where} has token {right} as both answers. Give two that differ.")
    return [int(token) for token in ids], int(right), MEAN if other is None else int(other)


def _of_text(where: str, tokenizer: Any, text: str, right: str, other: str | None) -> Read:
    if tokenizer is None:
        raise ArgumentError(f"{where} is a text. Give tokenizer=, or token ids.")
    continued = [text + right, text if other is None else text + other]
    first, second = (
        [token for token, added in zip(of.ids, _ends(of.special), strict=True) if not added]
        for of in token_offsets(tokenizer, continued)
    )
    same = [a == b for a, b in zip(first, second, strict=False)]
    shared = same.index(False) if False in same else len(same)
    if not shared and not text:
        raise InputError(f"{where} has an empty text. Give a text that the answers follow.")
    if not shared or shared >= len(first) or (other is not None and shared >= len(second)):
        raise InputError(
            f"{where}: {right!r} and {other!r} after {text[-30:]!r} do not differ in a token after "
            f"a token that they share. Give answers of which neither begins with the other."
        )
    return first[:shared], first[shared], MEAN if other is None else second[shared]


def _ends(special: Sequence[int]) -> list[bool]:
    """Which tokens are added after the text."""
    last = max((place for place, added in enumerate(special) if not added), default=-1)
    return [place > last for place in range(len(special))]


def batches_of(model: nn.Module, read: Sequence[Read]) -> list[Batch]:
    """The examples in batches, in their order, padded on the right."""
    keeps, device = bool(without_logits(model)), device_of(model)
    batches = []
    for start in range(0, len(read), SIZE):
        ids = [example[0] for example in read[start : start + SIZE]]
        inputs = pad(ids, device)
        positions = torch.tensor([len(text) - 1 for text in ids], device=device)
        kept = tuple(sorted(set(positions.tolist()))) if keeps else ()
        if keeps:
            inputs["logits_to_keep"] = torch.tensor(kept, device=device)
        batches.append(Batch(inputs, positions, kept))
    return batches
