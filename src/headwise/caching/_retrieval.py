"""Texts on which reading from far away decides the loss, from the vocabulary of any model."""

from typing import Any

import torch
from torch import nn

from headwise.errors import ArgumentError
from headwise.models import check_model, device_of
from headwise.models.texts import IGNORED
from headwise.shapes import is_size

_SPAN = 8  # tokens that occur twice


def retrieval_batches(
    model: nn.Module, n: int = 16, n_tokens: int = 1024, *, seed: int = 0
) -> list[dict[str, Any]]:
    """Texts of random tokens in which a span of eight occurs twice, far from each other.

    The second occurrence ends the text; its tokens from the third on are the labels. A model
    predicts them by copying from its context, whatever language it knows, so the loss grows when
    a head that copies streams. If the model is used for more than that, give `cache_plan` long
    texts of your own.

    Args:
        n: The number of texts, a batch each.
        n_tokens: The length of each text.
    Returns:
        Batches of one text: `input_ids`, and `labels` that leave out all but the second span.
    Raises:
        ArgumentError: there is no text or vocabulary, or texts have fewer than 32 tokens.
    """
    config: Any = getattr(check_model("retrieval_batches", model), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    n_words = getattr(config, "vocab_size", 0)
    if not is_size(n) or not is_size(n_tokens) or n_tokens < 4 * _SPAN:
        raise ArgumentError(
            f"retrieval_batches: n={n}, n_tokens={n_tokens}. Give at least one text of "
            f"{4 * _SPAN} tokens or more."
        )
    if n_words <= _SPAN:
        raise ArgumentError(
            f"retrieval_batches: {type(model).__name__} has only {n_words} tokens to draw from for "
            f"a span of {_SPAN}. Give texts of your own."
        )
    rng = torch.Generator().manual_seed(seed)
    device = device_of(model)
    batches = []
    for _ in range(n):
        ids = torch.randint(0, n_words, (1, n_tokens), generator=rng)
        start = int(torch.randint(0, n_tokens // 2, (), generator=rng))
        ids[:, -_SPAN:] = ids[:, start : start + _SPAN]
        labels = torch.full_like(ids, IGNORED)
        labels[:, 2 - _SPAN :] = ids[:, 2 - _SPAN :]
        batches.append({"input_ids": ids.to(device), "labels": labels.to(device)})
    return batches
