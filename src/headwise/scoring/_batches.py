"""The batches on which heads are scored: made from texts, or checked when they are ready."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise._packages import is_tokenizer_of_rust
from headwise.corpora import SentencePair, Several, list_items, list_texts, refuse_path
from headwise.errors import ArgumentError, InputError
from headwise.models import (
    device_of,
    model_inputs,
)
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
from headwise.scoring._loss import Loss, embedding, texts_in
from headwise.scoring._task_score import Inputs, pair_score

# Texts in one batch.
_BATCH_SIZE = 16
# Texts are sorted by length if that leaves at most this share of the tokens. A batch of so many
# texts takes no further one that is longer than the shortest by this factor.
_WORTH, _FEWEST, _ALIKE = 0.9, 8, 1.15
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids"}
# The share of tokens that BERT's own training masks.
_MASKED_SHARE = 0.15

BatchesLike: TypeAlias = Several[str] | Several[Mapping[str, Any]]


def read_batches(
    texts_or_batches: BatchesLike, model: nn.Module, tokenizer: Any, max_tokens: int | None = None
) -> list[Inputs]:
    """Return batches on the model's device: ready batches unchanged, or batches made from texts.

    A masked language model gets a share of the tokens of each text masked, the same ones in
    every call. An encoder-decoder gets each text as its own target.

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


def split_batches(batches: Sequence[Inputs], size: int) -> list[Inputs]:
    """The same texts with at most `size` in a batch; ready batches that are small enough stay."""
    parts: list[Inputs] = []
    for batch in batches:
        texts = texts_in(batch)
        for start in range(0, texts, size):
            rows = slice(start, start + size)
            parts.append({k: x[rows] if _has_rows(x, texts) else x for k, x in batch.items()})
    return parts


def sort_by_length(batches: Sequence[Inputs]) -> tuple[list[Inputs], list[int]] | None:
    """The same texts in batches of about equal length, if that leaves out much padding.

    Batches have to hold nothing but tokens that are padded on the right, on a CPU, where a pass
    takes time for each token. The new ones have no more texts, and no more tokens, than the
    largest of them.

    Returns:
        The batches, and for each of their texts its place among all texts; None where batches
        hold other inputs, or little padding.
    """
    lengths = [_lengths(batch) for batch in batches]
    if not all(lengths) or len({tuple(sorted(batch)) for batch in batches}) > 1:
        return None
    texts = [
        (n, {name: x[row] for name, x in batch.items()})
        for batch, length in zip(batches, lengths, strict=True)
        for row, n in enumerate(length)
    ]
    sizes = [batch["attention_mask"].numel() for batch in batches]
    groups: list[list[int]] = [[]]
    for place in sorted(range(len(texts)), key=lambda place: texts[place][0]):
        n, group = texts[place][0], groups[-1]
        is_full = len(group) == max(map(len, lengths)) or (len(group) + 1) * n > max(sizes)
        if is_full or (len(group) >= _FEWEST and n > _ALIKE * texts[group[0]][0]):
            groups.append([])
        groups[-1].append(place)
    widths = [texts[group[-1]][0] for group in groups]
    if sum(len(g) * n for g, n in zip(groups, widths, strict=True)) > _WORTH * sum(sizes):
        return None
    by_length: list[Inputs] = [
        {name: _stacked([texts[place][1][name] for place in group], n) for name in batches[0]}
        for group, n in zip(groups, widths, strict=True)
    ]
    return by_length, [place for group in groups for place in group]


def _stacked(rows: Sequence[Tensor], width: int) -> Tensor:
    """Rows of tokens that are cut, or padded with zeros, to a width."""
    return torch.stack([pad(row[:width], (0, max(0, width - len(row)))) for row in rows])


def _lengths(batch: Inputs) -> list[int]:
    """The tokens of each text, if all inputs are of its tokens, padded on the right; else none."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.device.type != "cpu":
        return []
    if not batch.keys() <= _OF_TOKENS or {x.shape for x in batch.values()} != {mask.shape}:
        return []
    lengths = (mask != 0).sum(1)
    on_right = (mask != 0) == (torch.arange(mask.shape[1]) < lengths[:, None])
    # A single token predicts nothing, and two of them are what a loss may need.
    return lengths.clamp(min=2).tolist() if bool(on_right.all()) else []


def _has_rows(value: Any, texts: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == texts


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
        raise ArgumentError(f"paired: {len(pairs)} pairs. Give at least 2.")
    sentences = [pair.one for pair in pairs] + [pair.two for pair in pairs]
    pieces = [encode(tokenizer, [sentence], model, max_tokens)[0] for sentence in sentences]
    device = device_of(model)
    inputs: list[Inputs] = [vars(batch) for batch in batches(pieces, _BATCH_SIZE, device)]
    # `batches` sorts by length, so the sentences stand in this order.
    order = sorted(range(len(pieces)), key=lambda sentence: len(pieces[sentence]))
    loss = embedding()
    similarities = [pair.similarity for pair in pairs]
    return inputs, replace(loss, score=pair_score(loss.of, similarities, order))


def _batches_of_texts(
    texts: list[str], model: nn.Module, tokenizer: Any, max_tokens: int | None
) -> list[Inputs]:
    if tokenizer is None:
        raise ArgumentError(
            f"batches: {len(texts)} texts without a tokenizer. Give tokenizer=, or batches."
        )
    check_reads_text("batches", model)
    device = device_of(model)
    if reads_two_texts(model):
        pairs = as_pieces(tokenizer, [(text, text) for text in texts], model, max_tokens)
        labels = "labels" in signature(model.forward).parameters
        return list(inputs_of(pairs, _BATCH_SIZE, device, labels=labels))
    pieces = encode(tokenizer, texts, model, max_tokens)
    inputs: list[Inputs] = [vars(batch) for batch in batches(pieces, _BATCH_SIZE, device)]
    if not type(model).__name__.endswith("ForMaskedLM"):
        return inputs
    mask_id = _mask_id(tokenizer)
    special_ids, _ = token_classes(tokenizer).get("special", (frozenset(), ""))
    rng = torch.Generator().manual_seed(0)
    return [_mask_tokens(batch, mask_id, sorted(special_ids), rng) for batch in inputs]


def _mask_id(tokenizer: Any) -> int:
    mask_id = None if is_tokenizer_of_rust(tokenizer) else tokenizer.mask_token_id
    if mask_id is None:
        raise InputError(
            f"batches: {type(tokenizer).__name__} has no mask token. Give batches with labels."
        )
    return int(mask_id)


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
