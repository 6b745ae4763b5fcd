"""The batches on which heads are scored: made from texts, or checked when they are ready."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._display import counted
from headwise._extras import is_tokenizer_of_rust
from headwise.corpora import SentencePair, Several, list_items, list_texts, refuse_path
from headwise.errors import ArgumentError, InputError
from headwise.models import check_model, device_of, model_inputs
from headwise.models.texts import (
    IGNORED,
    as_pieces,
    batches,
    check_reads_text,
    encode,
    inputs_of,
    reads_two_texts,
    token_classes,
)
from headwise.scoring._loss import EMBEDDING, Inputs, Loss, Score, rank_correlation, texts_in

# Texts in one batch.
_BATCH_SIZE = 16
# The share of tokens that BERT's own training masks.
_MASKED_SHARE = 0.15

BatchesLike: TypeAlias = Several[str] | Several[Mapping[str, Any]]


def read_batches(
    texts_or_batches: BatchesLike, model: nn.Module, tokenizer: Any, max_tokens: int | None = None
) -> list[Inputs]:
    """Return batches on the model's device: ready batches unchanged, or batches made from texts.

    A masked language model gets a share of the tokens of each text masked, the same ones in
    every call; one in a `SparseEncoder` reads them as they are. An encoder-decoder gets each text
    as its own target.

    A single string is one text.

    Raises:
        ArgumentError: there are no texts or batches, an item is neither, or texts come without
            a tokenizer.
        InputError: the tokenizer of a masked language model has no mask token.
    """
    refuse_path("batches", "batches", texts_or_batches)
    # Iterating over a single batch would yield the names of its tensors. A column of a data
    # frame has `items` too and is not a batch.
    single = isinstance(texts_or_batches, str) or (
        hasattr(texts_or_batches, "items") and not hasattr(texts_or_batches, "iloc")
    )
    single = single or not isinstance(texts_or_batches, Iterable)
    items: list[Any] = [texts_or_batches] if single else list(texts_or_batches)
    if not items:
        raise ArgumentError("batches: 0 given. Give texts, or at least one batch.")
    if any(isinstance(item, str) for item in items):
        frame = hasattr(texts_or_batches, "columns")
        texts = list_texts("batches", texts_or_batches if frame else items, "batches")
        return _batches_of_texts(texts, model, tokenizer, max_tokens)
    device = device_of(model)
    return [_on_device(batch, device) for batch in items]


def paired(
    pairs: Several[SentencePair], model: nn.Module, tokenizer: Any, max_tokens: int | None = None
) -> tuple[list[Inputs], Loss]:
    """Return batches of the sentences of some pairs, and the embedding loss with its task score.

    The score is Spearman's correlation between the cosine similarity of two sentences and their
    annotated similarity. Sentences that are too long are truncated.

    Raises:
        ArgumentError: there are fewer than two pairs.
    """
    pairs = list_items("paired", "pairs", pairs, SentencePair)
    if len(pairs) < 2:
        raise ArgumentError(f"paired: {counted(len(pairs), 'pair')}. Give at least 2.")
    sentences = [pair.one for pair in pairs] + [pair.two for pair in pairs]
    pieces = [encode(tokenizer, [sentence], model, max_tokens)[0] for sentence in sentences]
    device = device_of(model)
    inputs: list[Inputs] = [*batches(pieces, _BATCH_SIZE, device)]
    # `batches` sorts by length, so the sentences stand in this order.
    order = sorted(range(len(pieces)), key=lambda sentence: len(pieces[sentence]))
    similarities = np.array([pair.similarity for pair in pairs])

    def correlation(rows: Float[Tensor, "rows d_model"]) -> float:
        first, second = rows[np.argsort(order)].chunk(2)
        return rank_correlation((first * second).sum(1).numpy(), similarities)

    score = Score("spearman", EMBEDDING.of, correlation)
    return inputs, replace(EMBEDDING, score=score)


def _batches_of_texts(
    texts: list[str], model: nn.Module, tokenizer: Any, max_tokens: int | None
) -> list[Inputs]:
    if tokenizer is None:
        raise ArgumentError(
            f"batches: {counted(len(texts), 'text')} without a tokenizer. Give tokenizer=, or "
            f"batches."
        )
    outer, model = model, check_model("batches", model)
    check_reads_text("batches", model)
    device = device_of(model)
    if reads_two_texts(model):
        pairs = as_pieces(tokenizer, [(text, text) for text in texts], model, max_tokens)
        labels = "labels" in signature(model.forward).parameters
        return list(inputs_of(pairs, _BATCH_SIZE, device, labels=labels))
    pieces = encode(tokenizer, texts, model, max_tokens)
    inputs: list[Inputs] = [*batches(pieces, _BATCH_SIZE, device)]
    if not type(outer).__name__.endswith("ForMaskedLM"):
        return inputs
    mask_id = None if is_tokenizer_of_rust(tokenizer) else tokenizer.mask_token_id
    if mask_id is None:
        raise InputError(
            f"batches: {type(tokenizer).__name__} has no mask token. Give batches with labels."
        )
    special_ids, _ = token_classes(tokenizer).get("special", (frozenset(), ""))
    rng = torch.Generator().manual_seed(0)
    return [_mask_tokens(batch, mask_id, sorted(special_ids), rng) for batch in inputs]


def _mask_tokens(
    batch: Inputs, mask_id: int, special_ids: list[int], rng: torch.Generator
) -> Inputs:
    """Mask a share of the tokens of each text, at least one; labels hold the original tokens."""
    ids = batch["input_ids"]
    special = torch.isin(ids, torch.tensor(special_ids, device=ids.device))
    maskable = batch["attention_mask"].bool() & ~special
    draws = torch.rand(ids.shape, generator=rng).to(ids.device).masked_fill(~maskable, 2.0)
    number = (maskable.sum(1, keepdim=True) * _MASKED_SHARE).round().clamp(min=1)
    masked = (draws.argsort(1).argsort(1) < number) & maskable
    return {
        **batch,
        "input_ids": ids.masked_fill(masked, mask_id),
        "labels": ids.masked_fill(~masked, IGNORED),
    }


def _on_device(batch: Any, device: torch.device) -> Inputs:
    # A tokenizer's `BatchEncoding` has keys and items without being a Mapping.
    if not hasattr(batch, "items"):
        raise ArgumentError(
            f"batches: a batch is of type {type(batch).__name__}. Give the model's inputs by name, "
            f"such as input_ids and attention_mask."
        )
    inputs = model_inputs(batch)
    texts_in(inputs)  # raises for a batch without a tensor
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
