"""Texts as token ids, with the characters that each stands for, and as batches; any tokenizer."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unicodedata import category

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headwise._display import counted
from headwise._packages import is_tokenizer_of_rust, untruncated
from headwise.corpora import Span, Texts, list_texts
from headwise.errors import ArgumentError, InputError, UnsupportedError

# The context length if neither the model nor its tokenizer has a limit.
LONGEST = 2048
# The label of a token that losses ignore.
IGNORED = -100
# Marks of spaces in byte-level and SentencePiece vocabularies, and of continuations in WordPiece.
_MARKS = "\u0120\u010a\u2581#"
_SPACE = "\u2581"  # before a word, in SentencePiece
_SPACES = "\u0120" + _SPACE


@dataclass(frozen=True)
class Batch:
    """Texts padded on the right to the same length; the mask is 1 for real tokens."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Int[Tensor, "B T"]


def encode(
    tokenizer: Any, texts: Texts, model: nn.Module, max_tokens: int | None = None
) -> list[list[int]]:
    """The token ids of each text; a text that is too long becomes several.

    Args:
        texts: A string is one text.
        max_tokens: The most tokens in one piece. None is the context length of the model.
    Raises:
        ArgumentError: `max_tokens` is below 2 or leaves no room beside the tokenizer's special
            tokens, or an entry is not a text.
        InputError: the texts contain no tokens.
        UnsupportedError: the tokenizer cannot cut long texts (a slow tokenizer).
    """
    limit = context_of(model, tokenizer, max_tokens)
    texts = list_texts("encode", texts)
    pieces = [piece for text in texts for piece in pieces_of(tokenizer, text, limit) if piece]
    if not pieces:
        raise InputError(
            f"encode: {counted(len(texts), 'text')} without a token. Give texts with words."
        )
    return pieces


def context_of(model: nn.Module, tokenizer: Any, max_tokens: int | None = None) -> int:
    """The context length of a model according to its configuration and its tokenizer.

    Args:
        max_tokens: The most that is wanted; None is all.
    Raises:
        ArgumentError: `max_tokens` is below 2, or leaves no room beside the special tokens.
    """
    if max_tokens is not None:
        _check_room(tokenizer, max_tokens)
    config = getattr(model, "config", None)
    parts = [config, *(getattr(config, part, None) for part in ("encoder", "decoder"))]
    known = [getattr(part, name, None) for part in parts for name in _LENGTHS]
    known.append(getattr(tokenizer, "model_max_length", None))
    limit = int(min([size for size in known if size] + [LONGEST]))
    return limit if max_tokens is None else min(limit, max_tokens)


def _check_room(tokenizer: Any, max_tokens: int) -> None:
    is_fast = getattr(tokenizer, "is_fast", False)
    added = tokenizer.num_special_tokens_to_add() if is_fast else 0
    least = max(2, added + 1)
    if max_tokens < least:
        why = f", and the tokenizer adds {added} of its own" if added > 1 else ""
        raise ArgumentError(f"encode: max_tokens={max_tokens}{why}. Give at least {least}.")


_LENGTHS = (
    "context",
    "max_position_embeddings",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)


def check_tokenizer(tokenizer: Any, caller: str) -> None:
    """Refuse a folder or a name in place of a tokenizer."""
    if isinstance(tokenizer, str | os.PathLike):
        raise ArgumentError(
            f"{caller}: tokenizer={str(tokenizer)!r:.80} is a {type(tokenizer).__name__}. Open it "
            f"with headwise.load_tokenizer."
        )


@dataclass(frozen=True)
class TokenOffsets:
    """The tokens of one text.

    Attributes:
        ids: The token ids.
        spans: The characters of each token in the text; empty for tokens without any, such as
            the space that a tokenizer puts before a text.
        added: 1 for a special token that the tokenizer added.
    """

    ids: Sequence[int]
    spans: Sequence[Span]
    added: Sequence[int]

    def tokens_in(self, text: str, span: Span) -> list[int]:
        """The tokens that share a character other than white space with a span of the text."""
        first, last = span
        return [
            token
            for token, (token_first, token_last) in enumerate(self.spans)
            if not self.added[token]
            and (start := max(first, token_first)) < (end := min(last, token_last))
            and text[start:end].strip()
        ]


@contextmanager
def _panics_refused(tokenizer: Any) -> Iterator[None]:
    """Refuse a tokenizer that ends in a panic of Rust, such as by a regular expression that takes
    too many steps. Python has it as a `BaseException`, which no caller would catch."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or [""])[0][:200]
        raise UnsupportedError(
            f"encode: {type(tokenizer).__name__} failed in a text ({reason}). Its rules do not fit "
            f"such texts: give shorter ones, or another tokenizer."
        ) from None


def pieces_of(
    tokenizer: Any, text: str, limit: int, *, target: bool = False, begin: bool = False
) -> list[list[int]]:
    """The token ids of a text, split into pieces of at most `limit`.

    Args:
        target: Whether it is the target of an encoder-decoder; some tokenize targets differently.
        begin: Whether only the first piece is needed.
    Raises:
        UnsupportedError: the tokenizer cannot cut a text that is too long (a slow tokenizer).
    """
    check_tokenizer(tokenizer, "encode")
    tokenizer = untruncated(tokenizer)
    if is_tokenizer_of_rust(tokenizer):
        with _panics_refused(tokenizer):
            ids = tokenizer.encode(text).ids
        return [ids[start : start + limit] for start in range(0, len(ids), limit)]
    argument = {"text_target" if target else "text": text}
    if getattr(tokenizer, "is_fast", False):
        options = {"truncation": True, "max_length": limit, "return_overflowing_tokens": True}
        with _panics_refused(tokenizer):
            return list(tokenizer(**argument, **options)["input_ids"])
    ids = tokenizer(**argument)["input_ids"]
    if len(ids) <= limit:
        return [ids]
    if begin:
        return [tokenizer(**argument, truncation=True, max_length=limit)["input_ids"]]
    raise UnsupportedError(
        f"encode: {type(tokenizer).__name__} is a slow tokenizer, which cannot cut a text of "
        f"{len(ids)} tokens, more than {limit}. Cut it yourself, or load a fast tokenizer."
    )


def token_offsets(tokenizer: Any, texts: Sequence[str]) -> list[TokenOffsets]:
    """The tokens of each text and their characters, whatever the tokenizer truncates or pads.

    Raises:
        UnsupportedError: the tokenizer does not report character offsets.
    """
    check_tokenizer(tokenizer, "encode")
    tokenizer = untruncated(tokenizer)
    if is_tokenizer_of_rust(tokenizer):
        with _panics_refused(tokenizer):
            encodings = tokenizer.encode_batch(list(texts)) if texts else []
        columns = [(e.ids, e.offsets, e.special_tokens_mask, e.tokens) for e in encodings]
    elif not getattr(tokenizer, "is_fast", False):
        raise UnsupportedError(
            f"tokenize: {type(tokenizer).__name__} cannot say which characters a token stands "
            f"for (a slow tokenizer). Load its fast version (use_fast=True)."
        )
    elif not texts:  # some tokenizers reject an empty list
        return []
    else:
        with _panics_refused(tokenizer):
            output = tokenizer(
                list(texts),
                truncation=False,
                padding=False,
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
                verbose=False,  # the caller cuts texts that are too long
            )
        names = [output.tokens(number) for number in range(len(texts))]
        parts = (output["input_ids"], output["offset_mapping"], output["special_tokens_mask"])
        columns = list(zip(*parts, names, strict=True))
    return [
        TokenOffsets(ids, _own_characters(text, spans, names), added)
        for text, (ids, spans, added, names) in zip(texts, columns, strict=True)
    ]


def _own_characters(text: str, spans: Sequence[Span], names: Sequence[str]) -> list[Span]:
    """The spans of tokens, empty for a space that is not in the text.

    A tokenizer that puts a space before a text says of a token of that space alone, as before
    Chinese, that it stands for the first character.
    """
    return [
        (start, start)
        if name and not name.strip(_SPACES) and text[start:end].strip() not in ("", name)
        else (start, end)
        for (start, end), name in zip(spans, names, strict=True)
    ]


def batches(pieces: Sequence[Sequence[int]], size: int, device: Any = "cpu") -> Iterator[Batch]:
    """Batches of pieces of similar length, to keep padding short."""
    ordered = sorted(pieces, key=len)
    for start in range(0, len(ordered), size):
        yield pad(ordered[start : start + size], device)


def pad(pieces: Sequence[Sequence[int]], device: Any) -> Batch:
    """Token ids as one batch, padded on the right."""
    longest = max(len(piece) for piece in pieces)
    # Padding is masked, so any id will do; 0 exists in every vocabulary.
    ids = torch.zeros(len(pieces), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece)] = torch.tensor(piece)
        mask[row, : len(piece)] = 1
    return Batch(ids.to(device), mask.to(device))


def token_strings(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as readable text."""
    if is_tokenizer_of_rust(tokenizer):
        return tuple(tokenizer.id_to_token(token) or f"#{token}" for token in ids)
    return tuple(_readable(tokenizer, token) for token in ids)


def _readable(tokenizer: Any, token: int) -> str:
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if piece.startswith(_SPACE):  # which a token decoded alone loses
        return piece.replace(_SPACE, " ")
    text = tokenizer.decode([token])
    if text and "\N{REPLACEMENT CHARACTER}" not in text:
        return str(text)
    return piece


# The classes of `token_classes`, in its order.
TOKEN_CLASSES = ("special", "punctuation")


def token_classes(tokenizer: Any) -> dict[str, tuple[frozenset[int], str]]:
    """Classes of tokens in most vocabularies: by name, their ids and a description."""
    classes = (
        (_special(tokenizer), "special tokens of the tokenizer"),
        (_punctuation(tokenizer), "tokens of punctuation alone"),
    )
    named = zip(TOKEN_CLASSES, classes, strict=True)
    return {name: (ids, description) for name, (ids, description) in named if ids}


def _special(tokenizer: Any) -> frozenset[int]:
    if is_tokenizer_of_rust(tokenizer):
        added = tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)
    return frozenset(tokenizer.all_special_ids)


def _punctuation(tokenizer: Any) -> frozenset[int]:
    special = _special(tokenizer)
    ids = set()
    for token, index in tokenizer.get_vocab().items():
        bare = token.strip(_MARKS)
        if index not in special and bare and all(category(c).startswith("P") for c in bare):
            ids.add(index)
    return frozenset(ids)
