"""Halves of texts that depend on what the texts say, not on their order."""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

DIGEST_SIZE = 16  # bytes


def digest_of_text(text: str) -> bytes:
    """What a text is known by wherever its sums are computed."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE).digest()


def halves_of_texts(
    digests: Sequence[bytes], seed: int = 0, number: int = 0
) -> Bool[np.ndarray, " M"]:
    """The texts of the selection half; the others are held out for reporting.

    Texts are ranked by a hash of their digest, the seed and the number of the split, and the
    first half of that order is the selection half. The same texts in another order, or from
    several shards, have the same halves.
    """
    key = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=DIGEST_SIZE).digest()
    ranks = [hashlib.blake2b(text, digest_size=DIGEST_SIZE, key=key).digest() for text in digests]
    selection = np.zeros(len(ranks), dtype=bool)
    selection[sorted(range(len(ranks)), key=ranks.__getitem__)[: len(ranks) // 2]] = True
    return selection
