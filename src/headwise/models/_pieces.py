"""Texts, and pairs of texts for encoder-decoders, as the inputs of a model."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError, HeadwiseError, InputError, UnsupportedError
from headwise.models._tokens import IGNORED, limit_of, pad, pieces_of

# What models of images and sound read.
_OTHER_INPUTS = ("pixel_values", "input_features", "input_values")


@dataclass(frozen=True)
class Piece:
    """What a model reads of one text, or of one pair of texts, at once.

    Attributes:
        source: The tokens of the text.
        labels: The tokens of its target, for an encoder-decoder.
        decoder: What the decoder reads so that it predicts the labels.
    """

    source: Sequence[int]
    labels: Sequence[int] = ()
    decoder: Sequence[int] = ()


def reads_two_texts(model: nn.Module) -> bool:
    """Whether a model is an encoder-decoder of texts: its decoder reads another text."""
    names = inspect.signature(model.forward).parameters
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    # The encoder of such a model says the same of itself, and takes one text.
    return bool(both) and "decoder_input_ids" in names


def check_reads_text(who: str, model: nn.Module) -> None:
    """Refuse a model that takes no token ids, such as one of images or speech.

    Raises:
        UnsupportedError: it takes none.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    main = getattr(model, "main_input_name", None)
    # What takes any argument by name may pass it on.
    anything = len(named) < len(parameters) and main in (None, "input_ids")
    if "input_ids" not in named and not anything:
        main = main or ", ".join(named[:2]) or "nothing"
        raise UnsupportedError(
            f"{who}: {type(model).__name__} reads {main}, not text. Watch it with "
            f"headwise.observe(model) while it runs on inputs of its own."
        )


@contextmanager
def text_alone(who: str, model: nn.Module) -> Iterator[None]:
    """Say plainly that a model of texts and images, or sound, does not run on text alone.

    Raises:
        UnsupportedError: it raised what Python raises for missing inputs.
    """
    try:
        yield
    except HeadwiseError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        names = inspect.signature(model.forward).parameters
        other = [name for name in _OTHER_INPUTS if name in names]
        if not other:
            raise
        raise UnsupportedError(
            f"{who}: {type(model).__name__} reads {other[0]} beside text, and does not run on "
            f"text alone ({str(error).splitlines()[0].rstrip('.')[:100]}). Give its text model, or "
            f"watch it with headwise.observe(model) while it runs on inputs of its own."
        ) from error


def as_pieces(
    tokenizer: Any,
    pairs: Sequence[tuple[str, str | None]],
    model: nn.Module,
    max_tokens: int | None = None,
) -> list[Piece]:
    """What a model reads of texts and their targets; None is a text without a target.

    A text that is too long becomes several pieces; so does a pair of a text with itself.

    Raises:
        ArgumentError: `max_tokens` is below 2, or the model does not say how its decoder begins.
        InputError: there are no tokens at all, or another pair is too long.
        UnsupportedError: the tokenizer cannot cut long texts (a slow tokenizer).
    """
    limit = limit_of(model, tokenizer, max_tokens)
    found: list[Piece] = []
    for number, (text, target) in enumerate(pairs):
        sources = pieces_of(tokenizer, text, limit)
        if target is None:
            found += [Piece(ids) for ids in sources if ids]
            continue
        labels = pieces_of(tokenizer, target, limit, target=True)
        if len(sources) != len(labels) or (len(sources) > 1 and text != target):
            raise InputError(
                f"encode: pair {number} does not fit into {limit} tokens at once: its text makes "
                f"{len(sources)} pieces, its target {len(labels)}. Shorten it, or leave it out."
            )
        found += [_pair(model, *both) for both in zip(sources, labels, strict=True) if all(both)]
    if not found:
        raise InputError(f"encode: {len(pairs)} texts hold no token. Give texts with words.")
    return found


def beginning_of(
    tokenizer: Any, pair: tuple[str, str | None], model: nn.Module, tokens: int
) -> Piece | None:
    """The first tokens of a text and of its target; None where one has none."""
    limit = limit_of(model, tokenizer, tokens)
    source = next(iter(pieces_of(tokenizer, pair[0], limit, begin=True)), ())
    if pair[1] is None:
        return Piece(source) if source else None
    labels = next(iter(pieces_of(tokenizer, pair[1], limit, target=True, begin=True)), ())
    return _pair(model, source, labels) if source and labels else None


def _pair(model: nn.Module, source: Sequence[int], labels: Sequence[int]) -> Piece:
    return Piece(source, labels, decoder_ids(model, labels))


def decoder_ids(model: nn.Module, labels: Sequence[int]) -> list[int]:
    """What a decoder reads to predict labels, made as the model itself makes it: shifted right.

    Raises:
        ArgumentError: the model's configuration does not say with which token a decoder begins.
        UnsupportedError: the model has no such function.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    given = torch.tensor([list(labels)], device=next(model.parameters()).device)
    try:
        for method in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
            shift: Any = getattr(model, method, None)
            if shift is not None:
                return [int(one) for one in shift(given)[0]]
        for cls in type(model).__mro__:
            shift = getattr(sys.modules.get(cls.__module__), "shift_tokens_right", None)
            if shift is not None:
                ends = [getattr(config, f"{kind}_token_id", None) for kind in _ENDS]
                count = len(inspect.signature(shift).parameters) - 1
                return [int(one) for one in shift(given, *ends[:count])[0]]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"decoder_ids: {name} does not say how its decoder begins ({error}). Set "
            f"model.config.decoder_start_token_id and model.config.pad_token_id."
        ) from error
    raise UnsupportedError(
        f"decoder_ids: {name} has no function that shifts labels to the right. Watch it with "
        f"headwise.observe(model) while it runs on inputs of its own."
    )


_ENDS = ("pad", "decoder_start")


def inputs_of(
    pieces: Sequence[Piece], size: int, device: Any = "cpu", *, labels: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Batches of pieces of about equal length as keyword arguments of the model.

    Args:
        labels: Whether the labels are among them.
    """
    ordered = sorted(pieces, key=lambda piece: len(piece.source))
    for start in range(0, len(ordered), size):
        those = ordered[start : start + size]
        batch = vars(pad([piece.source for piece in those], device)).copy()
        if those[0].decoder:
            decoder = pad([piece.decoder for piece in those], device)
            batch["decoder_input_ids"] = decoder.input_ids
            batch["decoder_attention_mask"] = decoder.attention_mask
        if those[0].decoder and labels:
            wanted = pad([piece.labels for piece in those], device)
            hidden = wanted.attention_mask == 0
            batch["labels"] = wanted.input_ids.masked_fill(hidden, IGNORED)
        yield batch
