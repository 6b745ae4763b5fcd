"""Texts as inputs of models: token ids, the characters of each, pieces and batches."""

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unicodedata import category

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from headwise._display import first_line, type_of
from headwise._extras import is_tokenizer_of_rust, untruncated
from headwise.corpora import Span, Texts, list_texts
from headwise.errors import ArgumentError, HeadwiseError, InputError, UnsupportedError
from headwise.models._model import device_of, is_sentence_transformer, without_compiler
from headwise.models._transformers_private import label_shift

# The context length if neither the model nor its tokenizer has a limit.
LONGEST = 2048
_LENGTHS = (
    "context",
    "max_position_embeddings",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
# The label of a token that losses ignore.
IGNORED = -100
# Marks of spaces in byte-level and SentencePiece vocabularies, and of continuations in WordPiece.
_MARKS = "\u0120\u010a\u2581#"
_SPACE = "\u2581"  # before a word, in SentencePiece
_SPACES = "\u0120" + _SPACE


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
    pairs = [(text, None) for text in list_texts("encode", texts)]
    return [[*piece.source] for piece in as_pieces(tokenizer, pairs, model, max_tokens)]


def context_of(model: nn.Module, tokenizer: Any, max_tokens: int | None = None) -> int:
    """The context length of a model according to its configuration and its tokenizer.

    Args:
        max_tokens: The most that is wanted; None is all.
    """
    if max_tokens is not None:
        is_fast = getattr(tokenizer, "is_fast", False)
        added = tokenizer.num_special_tokens_to_add() if is_fast else 0
        least = max(2, added + 1)
        if max_tokens < least:
            why = f", and the tokenizer adds {added} of its own" if added > 1 else ""
            raise ArgumentError(f"encode: max_tokens={max_tokens}{why}. Give at least {least}.")
    limit = min([*_lengths(model, tokenizer), LONGEST])
    return limit if max_tokens is None else min(limit, max_tokens)


def _lengths(model: nn.Module, tokenizer: Any) -> list[int]:
    """The most tokens that the configuration and the tokenizer name, each if it does."""
    config = getattr(model, "config", None)
    parts = [config, *(getattr(config, part, None) for part in ("encoder", "decoder"))]
    known = [getattr(part, name, None) for part in parts for name in _LENGTHS]
    known.append(getattr(tokenizer, "model_max_length", None))
    return [int(size) for size in known if size]


def check_fits(caller: str, model: nn.Module, tokenizer: Any, n_tokens: int) -> None:
    """Refuse a text that is longer than a model can read at once."""
    limit = min([*_lengths(model, tokenizer), n_tokens])
    if n_tokens > limit:
        raise ArgumentError(
            f"{caller}: the text has {n_tokens:,} tokens, and {type(model).__name__} reads "
            f"{limit:,}. Shorten it."
        )


def check_tokenizer(tokenizer: Any, caller: str) -> None:
    """Refuse a folder or a name in place of a tokenizer."""
    if isinstance(tokenizer, str | os.PathLike):
        raise ArgumentError(
            f"{caller}: tokenizer={str(tokenizer)!r:.80} is {type_of(tokenizer)}. Open it "
            f"with headwise.load_tokenizer."
        )


def tokenizer_of(model: nn.Module, tokenizer: Any, needed_by: str = "") -> Any:
    """The tokenizer argument, or that of a `SentenceTransformer`; None if there is neither.

    It is without truncation and padding of its own.

    Args:
        needed_by: The name of the calling function if it requires a tokenizer.
    """
    encoder: Any = without_compiler(model)
    check_tokenizer(tokenizer, needed_by or "encode")
    if tokenizer is None and is_sentence_transformer(encoder):
        tokenizer = encoder.tokenizer
    if tokenizer is None and needed_by:
        raise ArgumentError(
            f"{needed_by}: tokenizer=None, and {type(encoder).__name__} has none. Give tokenizer=."
        )
    return None if tokenizer is None else untruncated(tokenizer)


@dataclass(frozen=True)
class TokenOffsets:
    """The tokens of one text.

    Attributes:
        ids: The token ids.
        spans: The characters of each token in the text; empty for tokens without any, such as
            the space that a tokenizer puts before a text.
        special: Whether each token is special: it belongs to no stretch of the text.
    """

    ids: Sequence[int]
    spans: Sequence[Span]
    special: Sequence[int]

    def tokens_in(self, text: str, span: Span) -> list[int]:
        """The tokens that share a character other than white space with a span of the text."""
        first, last = span
        return [
            token
            for token, (token_first, token_last) in enumerate(self.spans)
            if not self.special[token]
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
        raise UnsupportedError(
            f"encode: {type(tokenizer).__name__} failed in a text ({first_line(error)}). "
            f"Its rules do not fit such texts: give shorter ones, or another tokenizer."
        ) from None


def pieces_of(
    tokenizer: Any, text: str, limit: int, *, target: bool = False, begin: bool = False
) -> list[list[int]]:
    """The token ids of a text, split into pieces of at most `limit`.

    Args:
        target: Whether it is the target of an encoder-decoder; some tokenize targets differently.
        begin: Whether only the first piece is needed.
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
    """The tokens of each text and their characters, whatever the tokenizer truncates or pads."""
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


Batch = dict[str, Int[Tensor, "B T"]]


def batches(pieces: Sequence[Sequence[int]], size: int, device: Any = "cpu") -> Iterator[Batch]:
    """Batches of pieces of similar length, to keep padding short."""
    ordered = sorted(pieces, key=len)
    for start in range(0, len(ordered), size):
        yield pad(ordered[start : start + size], device)


def pad(pieces: Sequence[Sequence[int]], device: Any) -> Batch:
    """Token ids as inputs of a model, padded on the right; the mask is 1 for real tokens."""
    # Padding is masked, so any id will do; 0 exists in every vocabulary.
    rows = [torch.tensor(piece, dtype=torch.int64) for piece in pieces]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def token_strings(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as readable text."""
    if is_tokenizer_of_rust(tokenizer):
        return tuple(tokenizer.id_to_token(token) or f"#{token}" for token in ids)

    def readable(token: int) -> str:
        piece = str(tokenizer.convert_ids_to_tokens(token))
        if piece.startswith(_SPACE):  # which a token decoded alone loses
            return piece.replace(_SPACE, " ")
        text = tokenizer.decode([token])
        return str(text) if text and "\N{REPLACEMENT CHARACTER}" not in text else piece

    return tuple(map(readable, ids))


# The classes of `token_classes`, in its order.
TOKEN_CLASSES = ("special", "punctuation")


def token_classes(tokenizer: Any) -> dict[str, tuple[frozenset[int], str]]:
    """Classes of tokens in most vocabularies: by name, their ids and a description."""
    if is_tokenizer_of_rust(tokenizer):
        added = tokenizer.get_added_tokens_decoder()
        special = frozenset(index for index, token in added.items() if token.special)
    else:
        special = frozenset(tokenizer.all_special_ids)
    bare = {index: token.strip(_MARKS) for token, index in tokenizer.get_vocab().items()}
    punctuation = frozenset(
        index
        for index, token in bare.items()
        if index not in special and token and all(category(c).startswith("P") for c in token)
    )
    classes = {
        "special": (special, "special tokens of the tokenizer"),
        "punctuation": (punctuation, "tokens of punctuation alone"),
    }
    return {name: (ids, description) for name, (ids, description) in classes.items() if ids}


# The main inputs of models of images and sound.
_OTHER_INPUTS = ("pixel_values", "input_features", "input_values")


@dataclass(frozen=True)
class Piece:
    """The token ids that a model reads at once: of one text, or of one pair of texts.

    Attributes:
        source: The token ids of the text.
        labels: The token ids of its target, for an encoder-decoder.
        decoder: The decoder inputs for which the labels are predicted.
    """

    source: Sequence[int]
    labels: Sequence[int] = ()
    decoder: Sequence[int] = ()


def reads_two_texts(model: nn.Module) -> bool:
    """Whether a model is an encoder-decoder of texts, whose decoder reads a second text."""
    names = inspect.signature(model.forward).parameters
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    # The encoder of such a model has the same configuration, but takes one text.
    return bool(encoder_decoder) and "decoder_input_ids" in names


def check_reads_text(caller: str, model: nn.Module) -> None:
    """Refuse a model that takes no token ids, such as one of images or speech."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [x.name for x in parameters if x.kind is not x.VAR_KEYWORD]
    main = getattr(model, "main_input_name", None)
    # A forward with **kwargs may pass the token ids on.
    takes_kwargs = len(named) < len(parameters) and main in (None, "input_ids")
    reads_ids, tables = "input_ids" in named or takes_kwargs, None
    get_tables: Any = getattr(model, "get_input_embeddings", lambda: None)
    with suppress(NotImplementedError):  # models with two towers have no single one
        tables = get_tables()
    if isinstance(tables, nn.ModuleList):  # Musicgen, whose rows of ids are not texts
        main, reads_ids = f"{len(tables)} codebooks", False
    if not reads_ids:
        main = main or ", ".join(named[:2]) or "nothing"
        raise UnsupportedError(
            f"{caller}: {type(model).__name__} reads {main}, not text. Watch it with "
            f"headwise.observe(model) while it runs on its own inputs."
        )


def without_logits(model: nn.Module) -> dict[str, Tensor]:
    """What a language model takes besides its inputs if nobody reads its logits but the last.

    With a large vocabulary they are most of the time and memory of a pass: 2 GB for 2,048 tokens
    of 262,144. Every query of attention is computed all the same: of a number of logits, layers
    that share keys (Gemma 4) compute the last queries alone, but not of indices.
    """
    takes = inspect.signature(model.forward).parameters
    return {"logits_to_keep": torch.tensor([-1])} if "logits_to_keep" in takes else {}


def check_ids(where: str, ids: Iterable[int], model: nn.Module) -> None:
    """Check that the model has all tokens."""
    tables = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    size = getattr(getattr(model, "config", None), "vocab_size", max(tables, default=None))
    for token in ids:
        if isinstance(size, int) and not 0 <= token < size:
            raise ArgumentError(
                f"{where} has the token id {token}, and the model has {size}. Give ids from 0 to "
                f"{size - 1}."
            )


@contextmanager
def text_alone(caller: str, model: nn.Module, batch: Any = None) -> Iterator[None]:
    """Explain the error if a model of text and images, or sound, is run on text alone.

    Args:
        batch: What it is run on; None is text.
    """
    try:
        yield
    except HeadwiseError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        names = inspect.signature(model.forward).parameters
        given = batch if isinstance(batch, Mapping) else ["input_ids"] if batch is None else []
        inputs = [name for name in _OTHER_INPUTS if name in names and name not in given]
        if not inputs or "input_ids" not in given:
            raise
        raise UnsupportedError(
            f"{caller}: {type(model).__name__} reads {inputs[0]} beside text, and does not run on "
            f"text alone ({first_line(error, 100)}). Give its text model, or "
            f"watch it with headwise.observe(model) while it runs on its own inputs."
        ) from error


def as_pieces(
    tokenizer: Any,
    pairs: Sequence[tuple[str, str | None]],
    model: nn.Module,
    max_tokens: int | None = None,
) -> list[Piece]:
    """The pieces of `iter_pieces` as a list, of which there must be one."""
    pieces = list(iter_pieces(tokenizer, pairs, model, max_tokens))
    if not pieces:
        raise InputError(f"encode: {len(pairs)} texts hold no token. Give texts with words.")
    return pieces


def iter_pieces(
    tokenizer: Any,
    pairs: Iterable[tuple[str, str | None]],
    model: nn.Module,
    max_tokens: int | None = None,
) -> Iterator[Piece]:
    """Split texts and their targets into pieces that a model can read; a target may be None.

    A text that is too long becomes several pieces, and so does a pair of a text with itself; a text
    without a token has none.
    """
    limit = context_of(model, tokenizer, max_tokens)
    for number, (text, target) in enumerate(pairs):
        sources = pieces_of(tokenizer, text, limit)
        if target is None:
            yield from (Piece(ids) for ids in sources if ids)
            continue
        labels = pieces_of(tokenizer, target, limit, target=True)
        if len(sources) != len(labels) or (len(sources) > 1 and text != target):
            raise InputError(
                f"encode: pair {number} does not fit into {limit} tokens at once: its text makes "
                f"{len(sources)} pieces, its target {len(labels)}. Shorten it, or leave it out."
            )
        for ids, predicted in zip(sources, labels, strict=True):
            if ids and predicted:
                yield Piece(ids, predicted, decoder_ids(model, predicted))


def beginning_of(
    tokenizer: Any, pair: tuple[str, str | None], model: nn.Module, tokens: int
) -> Piece | None:
    """The first tokens of a text and of its target; None if either has no tokens."""
    limit = context_of(model, tokenizer, tokens)
    source = next(iter(pieces_of(tokenizer, pair[0], limit, begin=True)), ())
    if pair[1] is None:
        return Piece(source) if source else None
    labels = next(iter(pieces_of(tokenizer, pair[1], limit, target=True, begin=True)), ())
    return Piece(source, labels, decoder_ids(model, labels)) if source and labels else None


def decoder_ids(model: nn.Module, labels: Sequence[int]) -> list[int]:
    """The decoder inputs for some labels, shifted right by the model's own function."""
    name, config = type(model).__name__, getattr(model, "config", None)
    ids = torch.tensor([list(labels)], device=device_of(model))
    padding, start = (getattr(config, f"{x}_token_id", None) for x in ("pad", "decoder_start"))
    if hasattr(model, "_shift_right") and start is None and padding is not None:
        # T5 and its relatives begin with the padding token if nothing else is configured.
        return [int(padding), *labels[:-1]]
    shift = label_shift(model)
    try:
        if shift is not None:
            return [int(token) for token in shift(ids)[0]]
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ArgumentError(
            f"decoder_ids: {name} does not say how its decoder begins ({error}). Set "
            f"model.config.decoder_start_token_id and model.config.pad_token_id."
        ) from error
    raise UnsupportedError(
        f"decoder_ids: {name} has no function that shifts labels to the right. Watch it with "
        f"headwise.observe(model) while it runs on its own inputs."
    )


def inputs_of(
    pieces: Sequence[Piece], size: int, device: Any = "cpu", *, labels: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Batches of pieces of similar length, as keyword arguments of the model.

    Args:
        labels: Whether to include the labels.
    """
    ordered = sorted(pieces, key=lambda piece: len(piece.source))
    for start in range(0, len(ordered), size):
        chunk = ordered[start : start + size]
        batch = pad([piece.source for piece in chunk], device)
        if chunk[0].decoder:
            decoder = pad([piece.decoder for piece in chunk], device)
            batch |= {f"decoder_{name}": x for name, x in decoder.items()}
        if chunk[0].decoder and labels:
            targets = pad([piece.labels for piece in chunk], device)
            hidden = targets["attention_mask"] == 0
            batch["labels"] = targets["input_ids"].masked_fill(hidden, IGNORED)
        yield batch
