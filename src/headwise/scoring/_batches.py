"""What a model reads while its heads are weighed: texts or ready batches, as one list."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from headwise.corpora import SentencePair, Several, list_items, list_texts
from headwise.errors import ArgumentError, InputError
from headwise.models import (
    IGNORED,
    as_pieces,
    batches,
    check_reads_text,
    encode,
    inputs_of,
    model_inputs,
    reads_two_texts,
    token_classes,
)
from headwise.scoring._loss import Loss, embedding, texts_in
from headwise.scoring._task_score import Inputs, pair_score

# Texts that the model reads at once.
_SIZE = 16
# The share of tokens that BERT's own training hid.
_HIDDEN = 0.15

BatchesLike: TypeAlias = Several[str] | Several[Mapping[str, Any]]


def read_batches(
    given: BatchesLike, model: nn.Module, tokenizer: Any, max_tokens: int | None = None
) -> list[Inputs]:
    """Batches on the model's device: those given, or made of texts.

    For a masked language model a share of the tokens of each text is hidden, the same ones
    each time. An encoder-decoder has each text as its own target.

    A string is one text.

    Raises:
        ArgumentError: there is nothing to read, something is neither a text nor a batch, or
            texts come without their tokenizer.
        InputError: a masked language model's tokenizer has no mask.
    """
    # A single batch would fall apart into the names of its tensors; a column of a data frame,
    # which is no batch, has `items` too.
    single = isinstance(given, str) or (hasattr(given, "items") and not hasattr(given, "iloc"))
    whole: list[Any] = [given] if single or not isinstance(given, Iterable) else list(given)
    if not whole:
        raise ArgumentError("batches: 0 given. Give texts, or at least one batch.")
    if any(isinstance(one, str) for one in whole):
        texts = list_texts("batches", given if hasattr(given, "columns") else whole, "batches")
        return _made_of(texts, model, tokenizer, max_tokens)
    device = next(model.parameters()).device
    return [_moved(batch, device) for batch in whole]


def paired(
    pairs: Several[SentencePair], model: nn.Module, tokenizer: Any, max_tokens: int | None = None
) -> tuple[list[Inputs], Loss]:
    """Batches of the sentences of some pairs, and the embedding loss with the score of the task:
    Spearman's correlation of the cosine of two sentences with how alike they are.

    A sentence that is too long is cut.

    Raises:
        ArgumentError: there are not two pairs.
    """
    pairs = list_items("paired", "pairs", pairs, SentencePair)
    if len(pairs) < 2:
        raise ArgumentError(f"paired: {len(pairs)} pairs. Give at least 2.")
    sentences = [pair.one for pair in pairs] + [pair.two for pair in pairs]
    pieces = [encode(tokenizer, [one], model, max_tokens)[0] for one in sentences]
    device = next(model.parameters()).device
    made: list[Inputs] = [vars(batch) for batch in batches(pieces, _SIZE, device)]
    # Batches are of about equal length, so their sentences stand in this order.
    places = sorted(range(len(pieces)), key=lambda at: len(pieces[at]))
    loss = embedding()
    similar = [pair.similarity for pair in pairs]
    return made, replace(loss, score=pair_score(loss.of, similar, places))


def _made_of(
    texts: list[str], model: nn.Module, tokenizer: Any, max_tokens: int | None
) -> list[Inputs]:
    if tokenizer is None:
        raise ArgumentError(
            f"batches: {len(texts)} texts without a tokenizer. Give tokenizer=, or batches."
        )
    check_reads_text("batches", model)
    device = next(model.parameters()).device
    if reads_two_texts(model):
        own = as_pieces(tokenizer, [(text, text) for text in texts], model, max_tokens)
        labels = "labels" in signature(model.forward).parameters
        return list(inputs_of(own, _SIZE, device, labels=labels))
    pieces = encode(tokenizer, texts, model, max_tokens)
    made: list[Inputs] = [vars(batch) for batch in batches(pieces, _SIZE, device)]
    if not type(model).__name__.endswith("ForMaskedLM"):
        return made
    mask, kept = _mask_id(tokenizer), token_classes(tokenizer).get("special", (frozenset(), ""))[0]
    rng = torch.Generator().manual_seed(0)
    return [_hide(batch, mask, sorted(kept), rng) for batch in made]


def _mask_id(tokenizer: Any) -> int:
    found = None if isinstance(tokenizer, Tokenizer) else tokenizer.mask_token_id
    if found is None:
        raise InputError(
            f"batches: {type(tokenizer).__name__} has no mask token. Give batches with labels."
        )
    return int(found)


def _hide(batch: Inputs, mask: int, kept: list[int], rng: torch.Generator) -> Inputs:
    """Hide a share of the tokens of each text, at least one; labels say what they were."""
    ids = batch["input_ids"]
    free = batch["attention_mask"].bool() & ~torch.isin(ids, torch.tensor(kept, device=ids.device))
    drawn = torch.rand(ids.shape, generator=rng).to(ids.device).masked_fill(~free, 2.0)
    number = (free.sum(1, keepdim=True) * _HIDDEN).round().clamp(min=1)
    hidden = (drawn.argsort(1).argsort(1) < number) & free
    return {
        **batch,
        "input_ids": ids.masked_fill(hidden, mask),
        "labels": ids.masked_fill(~hidden, IGNORED),
    }


def _moved(batch: Any, device: torch.device) -> Inputs:
    # A tokenizer's own batch has keys and items without being a mapping of the usual kind.
    if not hasattr(batch, "items"):
        raise ArgumentError(
            f"batches: one is a {type(batch).__name__}. Give the model's inputs by name, "
            f"such as input_ids and attention_mask."
        )
    inputs = model_inputs(batch)
    texts_in(inputs)  # which refuses one without a tensor
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
