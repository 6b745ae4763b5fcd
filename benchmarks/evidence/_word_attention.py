"""Attention between the words of a text, from the weights of all heads."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

import headwise as hw
from headwise.models.texts import batches
from headwise.tables import Head
from headwise.watch import Request


def weights_of(
    model: nn.Module, sequences: Sequence[Sequence[int]]
) -> Iterator[tuple[list[Head], np.ndarray]]:
    """The heads and their weights on each sequence, `[H, T, T]`."""
    for sequence in sequences:
        (batch,) = batches([sequence], 1)
        with torch.no_grad(), hw.observe(model, Request(statistics=(), maps=True)) as watch:
            model(**vars(batch))
        layers = watch.layers()
        maps = [block.weights[0].clone() for layer in layers for block in layer.blocks()]
        yield [head for layer in layers for head in layer.heads], torch.cat(maps).numpy()


def between_words(weights: np.ndarray, words: Sequence[Sequence[int]]) -> np.ndarray:
    """The mean over the tokens of a query word of the sum over those of a key word.

    Zero for words without tokens, and from a word to itself, as in Clark et al.

    Args:
        words: The tokens of each word.
    Returns:
        A matrix of queries and keys for each head, `[H, words, words]`.
    """
    member = np.zeros((len(words), weights.shape[1]), np.float32)
    for word, tokens in enumerate(words):
        member[word, list(tokens)] = 1
    between = (member / np.maximum(member.sum(1, keepdims=True), 1)) @ weights @ member.T
    between[:, range(len(words)), range(len(words))] = 0
    return between
