"""Random sequences that repeat, and the same positions without repetition."""

from collections.abc import Sequence

import numpy as np

from headwise.roles.relations._relations import Item, Role
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
INDUCTION = Role(
    "induction",
    "a token of a random sequence → what followed its earlier copies",
    lambda text: (),
    score="mass",
    kind="probe",
    ahead=True,
)
PROBED = (SAME, INDUCTION)


def probe(
    texts: Sequence[TokenText], limit: int, sequences: int, seed: int = 0
) -> tuple[list[Item], list[Item]]:
    """Sequences of random tokens that repeat, and controls of the same length that don't.

    Each has a prefix of random length and a period of its own, so no fixed distance and no
    position gives a copy away. A control has the pairs of its sequence and other tokens, so a
    head that goes by position scores there what it scores here. Tokens are those of the texts
    that are neither special nor punctuation, each as likely as any other; what the tokenizer
    puts before a text stands before these, too.

    Returns:
        The sequences and their controls; none where the texts have too few different tokens.
    """
    words = sorted(
        {
            one
            for text in texts
            for one, special, mark in zip(text.ids, text.special, text.punctuation, strict=True)
            if not special and not mark
        }
    )
    first = texts[0]
    before = first.ids[: next(at for at, special in enumerate(first.special) if not special)]
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
        (at, other)
        for at in range(start, end)
        for other in range(start + (at - start) % period, end, period)
        if other != at
    ]
    after = [(at, other + 1) for at, other in same if other < at]
    return {SAME.name: same, INDUCTION.name: after}


def _item(
    before: Sequence[int], ids: Sequence[int], pairs: dict[str, list[tuple[int, int]]]
) -> Item:
    whole = (*before, *ids)
    return Item(whole, {"token": [(at,) for at in range(len(before), len(whole))]}, pairs)
