"""Examples of a task: a text, a query, and the right and wrong stretches it may attend to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np
from torch import nn

from headwise._packages import is_tokenizer_of_rust, untruncated
from headwise.corpora import Example, Several, list_items
from headwise.errors import ArgumentError
from headwise.models.texts import (
    TokenOffsets,
    token_offsets,
)
from headwise.watch import Stretch, read_stretches, stretch_tokens


@dataclass(frozen=True)
class TokenExample:
    """An example in tokens; its stretches are the right ones, then the wrong ones.

    Attributes:
        n_right: The number of right stretches.
    """

    ids: tuple[int, ...]
    query: tuple[Stretch, ...]
    stretches: tuple[Stretch, ...]
    n_right: int
    answer: tuple[int, ...]

    def shuffled(self, rng: np.random.Generator) -> "TokenExample":
        """The same text with the tokens of all stretches dealt to them at random."""
        places = [place for start, end in self.stretches for place in range(start, end)]
        ids = np.array(self.ids)
        ids[places] = ids[rng.permutation(places)]
        return replace(self, ids=tuple(ids.tolist()))


def tokenized_examples(
    examples: Several[Example], tokenizer: Any, limit: int, model: nn.Module
) -> list[TokenExample]:
    """The examples in tokens.

    Raises:
        ArgumentError: something is not an example, or one is malformed, longer than `limit`, or
            has a token id that the model does not have.
        UnsupportedError: texts are strings and the tokenizer does not report character offsets.
    """
    listed = list_items("find_heads", "examples", examples, Example)
    texts = [example.text for example in listed if isinstance(example.text, str)]
    if texts and tokenizer is None:
        raise ArgumentError(
            f"find_heads: {len(texts)} examples are strings without a tokenizer. Give tokenizer=, "
            f"or token ids."
        )
    encoded = iter(token_offsets(tokenizer, texts) if texts else ())
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    read = []
    for number, example in enumerate(listed):
        tokens = next(encoded) if isinstance(example.text, str) else None
        where = f"find_heads: {example.source or f'example {number}'}"
        read.append(_read(where, example, tokens, tokenizer))
        if len(read[-1].ids) + len(read[-1].answer) > limit:
            raise ArgumentError(
                f"{where} has {len(read[-1].ids)} tokens and an answer of "
                f"{len(read[-1].answer)}, and the model reads {limit}. Shorten it."
            )
        _check_ids(where, read[-1], size)
    return read


def _check_ids(where: str, example: TokenExample, size: Any) -> None:
    """Refuse token ids that the model does not have, if its configuration says how many it has."""
    for token in (*example.ids, *example.answer):
        if isinstance(size, int) and not 0 <= token < size:
            raise ArgumentError(
                f"{where} has the token id {token}, and the model has {size}. Give ids from 0 to "
                f"{size - 1}."
            )


def _read(
    caller: str, example: Example, tokens: TokenOffsets | None, tokenizer: Any
) -> TokenExample:
    ids = example.text if tokens is None else tokens.ids
    if not len(ids) or not all(isinstance(token, Integral) for token in ids):
        raise ArgumentError(f"{caller} has the text {ids!r:.40}. Give a string or token ids.")
    named = {
        name: read_stretches(f"{caller}: {name}", getattr(example, name))
        for name in ("query", "right", "wrong")
    }
    if empty := [name for name, stretches in named.items() if not stretches]:
        raise ArgumentError(f"{caller} has {empty[0]}=[]. Give at least one (start, end).")
    if tokens is not None and isinstance(example.text, str):
        named = {
            name: [stretch_tokens(f"{caller}: {name}", example.text, tokens, s) for s in stretches]
            for name, stretches in named.items()
        }
    for name, stretches in named.items():
        for start, end in stretches:
            if end > len(ids):
                raise ArgumentError(
                    f"{caller}: {name} has ({start}, {end}) in a text of {len(ids)} tokens. Give "
                    f"positions from 0 to {len(ids)}."
                )
    _check_apart(caller, [*named["right"], *named["wrong"]])
    return TokenExample(
        tuple(int(token) for token in ids),
        tuple(named["query"]),
        (*named["right"], *named["wrong"]),
        len(named["right"]),
        _answer(caller, example.answer, tokenizer),
    )


def _answer(caller: str, answer: str | Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    """The token ids of an answer, without special tokens."""
    if not isinstance(answer, str):
        return tuple(int(token) for token in answer)
    if tokenizer is None:
        raise ArgumentError(
            f"{caller} has the answer {answer!r}, and no tokenizer. Give tokenizer=."
        )
    if is_tokenizer_of_rust(tokenizer):
        return tuple(untruncated(tokenizer).encode(answer, add_special_tokens=False).ids)
    return tuple(tokenizer(answer, add_special_tokens=False)["input_ids"])


def _check_apart(caller: str, stretches: Sequence[Stretch]) -> None:
    """Refuse candidates that share a token."""
    ordered = sorted(stretches)
    for (start, end), (next_start, next_end) in pairwise(ordered):
        if next_start < end:
            raise ArgumentError(
                f"{caller}: ({start}, {end}) and ({next_start}, {next_end}) of right and wrong "
                f"share a token. Give candidates that do not overlap."
            )
