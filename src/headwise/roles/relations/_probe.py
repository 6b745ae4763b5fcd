"""Probes: random sequences that repeat, and controls with the same positions that do not."""

from collections.abc import Sequence

import numpy as np

from headwise.roles.relations._items import Item
from headwise.roles.relations._relations import Role
from headwise.roles.relations._tokens import TokenText

_PREFIX = (0, 8)
_PERIOD = (5, 24)
_LONGEST = 96

SAME = Role(
    "same token",
    "a token of a random sequence → earlier copies of it (in an encoder: all others)",
    lambda text: (),
    score="mass",
    kind="probe",
)
PREFIX_MATCHING = Role(
    "prefix matching",
    "a token of a random sequence → what followed its earlier copies",
    lambda text: (),
    score="mass",
    kind="probe",
    ahead=True,
)
PROBED = (SAME, PREFIX_MATCHING)


def probe(
    texts: Sequence[TokenText], limit: int, sequences: int, seed: int = 0
) -> tuple[list[Item], list[Item]]:
    """Draw sequences of random tokens that repeat, and controls of the same length that do not.

    Each has a prefix of random length and a random period, so that neither a fixed distance nor
    a position predicts a copy. A control has the pairs of its sequence and other tokens, so that
    a purely positional head scores the same on both. Tokens are drawn uniformly from those of
    the texts that are neither special nor punctuation, after the special tokens that the
    tokenizer puts before a text.

    Returns:
        The sequences and their controls; none if the texts have too few different tokens.
    """
    return draw_probe(before_text(texts[0]), sorted(words_in(texts)), limit, sequences, seed)


def words_in(texts: Sequence[TokenText]) -> set[int]:
    """The tokens of texts that are neither special nor punctuation."""
    return {
        token
        for text in texts
        for token, special, mark in zip(text.ids, text.special, text.punctuation, strict=True)
        if not special and not mark
    }


def before_text(text: TokenText) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts before a text."""
    return text.ids[: text.special.index(False)]


def draw_probe(
    before: Sequence[int], words: Sequence[int], limit: int, sequences: int, seed: int
) -> tuple[list[Item], list[Item]]:
    """Draw the sequences of `probe` from these tokens, each after the tokens `before`."""
    length = min(limit, _LONGEST) - len(before)
    most = min(_PERIOD[1], length // 2, len(words))
    if most < _PERIOD[0]:
        return [], []
    rng = np.random.default_rng(seed)
    repeated, controls = [], []
    for _ in range(sequences):
        period = int(rng.integers(_PERIOD[0], most, endpoint=True))
        prefix = int(rng.integers(0, min(_PREFIX[1], length - 2 * period), endpoint=True))
        head = rng.choice(words, prefix)
        cycle = rng.choice(words, period, replace=False)
        copies = -(-(length - prefix) // period)
        ids = [*head.tolist(), *np.tile(cycle, copies).tolist()][:length]
        others = rng.choice(words, length, replace=len(words) < length)
        pairs = _pairs(len(before), prefix, period, length)
        repeated.append(_item(before, ids, pairs))
        controls.append(_item(before, others.tolist(), pairs))
    return repeated, controls


def _pairs(before: int, prefix: int, period: int, length: int) -> dict[str, list[tuple[int, int]]]:
    start, end = before + prefix, before + length
    same = [
        (query, copy)
        for query in range(start, end)
        for copy in range(start + (query - start) % period, end, period)
        if copy != query
    ]
    after = [(query, copy + 1) for query, copy in same if copy < query]
    return {SAME.name: same, PREFIX_MATCHING.name: after}


def _item(
    before: Sequence[int], ids: Sequence[int], pairs: dict[str, list[tuple[int, int]]]
) -> Item:
    tokens = (*before, *ids)
    units = [(position,) for position in range(len(before), len(tokens))]
    return Item(tokens, {"token": units}, pairs)
