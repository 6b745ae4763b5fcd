"""Texts, and pairs of texts for encoder-decoders, as model inputs."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError, HeadwiseError, InputError, UnsupportedError
from headwise.models._device import device_of
from headwise.models._tokens import IGNORED, context_of, pad, pieces_of

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
    """Refuse a model that takes no token ids, such as one of images or speech.

    Raises:
        UnsupportedError: it takes no token ids.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = [x.name for x in parameters if x.kind is not x.VAR_KEYWORD]
    main = getattr(model, "main_input_name", None)
    # A forward with **kwargs may pass the token ids on.
    takes_kwargs = len(named) < len(parameters) and main in (None, "input_ids")
    if "input_ids" not in named and not takes_kwargs:
        main = main or ", ".join(named[:2]) or "nothing"
        raise UnsupportedError(
            f"{caller}: {type(model).__name__} reads {main}, not text. Watch it with "
            f"headwise.observe(model) while it runs on its own inputs."
        )


@contextmanager
def text_alone(caller: str, model: nn.Module) -> Iterator[None]:
    """Explain the error if a model of text and images, or sound, is run on text alone.

    Raises:
        UnsupportedError: the block raised an error that missing inputs cause.
    """
    try:
        yield
    except HeadwiseError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        names = inspect.signature(model.forward).parameters
        inputs = [name for name in _OTHER_INPUTS if name in names]
        if not inputs:
            raise
        raise UnsupportedError(
            f"{caller}: {type(model).__name__} reads {inputs[0]} beside text, and does not run on "
            f"text alone ({str(error).splitlines()[0].rstrip('.')[:100]}). Give its text model, or "
            f"watch it with headwise.observe(model) while it runs on its own inputs."
        ) from error


def as_pieces(
    tokenizer: Any,
    pairs: Sequence[tuple[str, str | None]],
    model: nn.Module,
    max_tokens: int | None = None,
) -> list[Piece]:
    """Split texts and their targets into pieces that a model can read; a target may be None.

    A text that is too long becomes several pieces; so does a pair of a text with itself.

    Raises:
        ArgumentError: `max_tokens` is below 2, or the first decoder token is unknown.
        InputError: the texts contain no tokens, or a pair of different texts is too long.
        UnsupportedError: the tokenizer cannot cut long texts (a slow tokenizer).
    """
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
    """The pieces of `as_pieces`, one text after the other; a text without a token has none.

    Raises:
        ArgumentError: `max_tokens` is below 2, or the first decoder token is unknown.
        InputError: a pair of different texts is too long.
        UnsupportedError: the tokenizer cannot cut long texts (a slow tokenizer).
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
        pairs_of_ids = zip(sources, labels, strict=True)
        yield from (_pair(model, *pair) for pair in pairs_of_ids if all(pair))


def beginning_of(
    tokenizer: Any, pair: tuple[str, str | None], model: nn.Module, tokens: int
) -> Piece | None:
    """The first tokens of a text and of its target; None if either has no tokens."""
    limit = context_of(model, tokenizer, tokens)
    source = next(iter(pieces_of(tokenizer, pair[0], limit, begin=True)), ())
    if pair[1] is None:
        return Piece(source) if source else None
    labels = next(iter(pieces_of(tokenizer, pair[1], limit, target=True, begin=True)), ())
    return _pair(model, source, labels) if source and labels else None


def _pair(model: nn.Module, source: Sequence[int], labels: Sequence[int]) -> Piece:
    return Piece(source, labels, decoder_ids(model, labels))


def decoder_ids(model: nn.Module, labels: Sequence[int]) -> list[int]:
    """The decoder inputs for some labels, shifted right by the model's own function.

    Raises:
        ArgumentError: the configuration of the model lacks the first decoder token.
        UnsupportedError: the model has no such function.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    ids = torch.tensor([list(labels)], device=device_of(model))
    try:
        padding = getattr(config, "pad_token_id", None)
        if hasattr(model, "_shift_right") and _start_token(model) is None and padding is not None:
            # T5 and its relatives begin with the padding token if nothing else is configured.
            return [int(padding), *labels[:-1]]
        for method in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
            shift: Any = getattr(model, method, None)
            if shift is not None:
                return [int(token) for token in shift(ids)[0]]
        for cls in type(model).__mro__:
            shift = getattr(sys.modules.get(cls.__module__), "shift_tokens_right", None)
            if shift is not None:
                ends = [getattr(config, f"{kind}_token_id", None) for kind in _ENDS]
                count = len(inspect.signature(shift).parameters) - 1
                return [int(token) for token in shift(ids, *ends[:count])[0]]
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ArgumentError(
            f"decoder_ids: {name} does not say how its decoder begins ({error}). Set "
            f"model.config.decoder_start_token_id and model.config.pad_token_id."
        ) from error
    raise UnsupportedError(
        f"decoder_ids: {name} has no function that shifts labels to the right. Watch it with "
        f"headwise.observe(model) while it runs on its own inputs."
    )


_ENDS = ("pad", "decoder_start")


def _start_token(model: nn.Module) -> int | None:
    """The first decoder token in the configuration, which may lack the attribute altogether."""
    return getattr(getattr(model, "config", None), "decoder_start_token_id", None)


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
        batch = vars(pad([piece.source for piece in chunk], device)).copy()
        if chunk[0].decoder:
            decoder = pad([piece.decoder for piece in chunk], device)
            batch["decoder_input_ids"] = decoder.input_ids
            batch["decoder_attention_mask"] = decoder.attention_mask
        if chunk[0].decoder and labels:
            targets = pad([piece.labels for piece in chunk], device)
            hidden = targets.attention_mask == 0
            batch["labels"] = targets.input_ids.masked_fill(hidden, IGNORED)
        yield batch
