"""Relations: sets of (query, key) pairs of one text, over its tokens, words or mentions."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from headwise.errors import ArgumentError
from headwise.roles.relations._tokens import TokenText

Pairs = Iterable[tuple[int, int]]
# What is a query and a key: a token, a word, or a mention, counted within the text.
Grid = Literal["token", "word", "mention"]
GRIDS: tuple[Grid, ...] = ("token", "word", "mention")


@dataclass(frozen=True)
class Role:
    """What a head may do, as a relation, and how it is scored.

    Attributes:
        name: What the role is called.
        says: The same in words.
        pairs: From a text to its pairs (query, key) on the grid.
        grid: Whether pairs are of tokens, words or mentions.
        score: `top`, the share of queries whose largest weight among the candidates lies on
            the relation; `mass`, the attention that they give to it; or `entropy`, how even it
            is over all keys: 0 on a single key, 1 on all of them alike.
        kind: Which nulls apply.
        bar: The lift over the strongest null from which a head has the role.
        points: How far above that null its score must lie as well, from 0 to 1.
        ahead: Whether it makes sense only where no head may look ahead.
    """

    name: str
    says: str
    pairs: Callable[[TokenText], Pairs]
    grid: Grid = "token"
    score: Literal["top", "mass", "entropy"] = "top"
    kind: Literal["offset", "sink", "class", "breadth", "structure", "probe"] = "structure"
    bar: float = 0.25
    points: float = 0.0
    ahead: bool = False


@dataclass(frozen=True)
class Item:
    """One text as it is scored.

    Attributes:
        ids: The tokens.
        units: What is a query and a key on each grid: its tokens. On the grid of tokens the
            tokens that may be a candidate, in order.
        pairs: The pairs of units (query, key) of each role, by its name.
        tags: The class of each unit of the grid of words.
    """

    ids: tuple[int, ...]
    units: Mapping[Grid, Sequence[Sequence[int]]]
    pairs: Mapping[str, Sequence[tuple[int, int]]]
    tags: Sequence[str] = ()


# Heads that learned nothing are nearly even: what they leave open is little, and no small part of
# it tells one head from another.
_BAR_OF_BREADTH = 0.75
_FARTHEST = 5  # tokens
_COMMON = 500  # tokens too frequent to be rare
_FEWEST = 5  # content tokens in a text with a rare one
_NEAR = {-1: "previous token", 0: "self", 1: "next token"}


def content(text: TokenText) -> list[int]:
    """The tokens that are text."""
    return [at for at, special in enumerate(text.special) if not special]


def token_roles(texts: Sequence[TokenText]) -> list[Role]:
    """The roles that any text can show: offsets, sinks, separators, rare tokens, evenness."""
    known = {at for text in texts for at in text.ids}
    frequency = Counter(one for text in texts for one in text.ids)
    ranked = [one for one, _ in frequency.most_common()]
    common = frozenset(ranked[: min(_COMMON, len(known) // 2)])
    return [
        *_offsets(),
        Role("first token", "a token → the first token", _first, score="mass", kind="sink"),
        Role(
            "separator",
            "a token → special tokens after the first",
            _separators,
            score="mass",
            kind="sink",
        ),
        Role("punctuation", "a token → punctuation", _marks, score="mass", kind="class"),
        Role(
            "rare token",
            "a token → the rarest token of the text",
            partial(_rarest, frequency, common),
            kind="class",
        ),
        Role(
            "diffuse",
            "a token → all that it may see, evenly",
            partial(_offset, 0),
            score="entropy",
            kind="breadth",
            bar=_BAR_OF_BREADTH,
        ),
    ]


def _offsets() -> list[Role]:
    near_first = sorted(range(-_FARTHEST, _FARTHEST + 1), key=lambda by: (abs(by), by))
    return [
        Role(
            _NEAR.get(by, f"offset {by:+d}"),
            f"a token → {_where(by)}",
            partial(_offset, by),
            kind="offset",
        )
        for by in near_first
    ]


def _where(by: int) -> str:
    if by == 0:
        return "itself"
    side = "before" if by < 0 else "after"
    return f"the token {side} it" if abs(by) == 1 else f"{abs(by)} tokens {side} it"


def _offset(by: int, text: TokenText) -> Pairs:
    inside = content(text)
    keys = set(inside)
    return [(at, at + by) for at in inside if at + by in keys]


def _first(text: TokenText) -> Pairs:
    return [(at, 0) for at in content(text) if at]


def _separators(text: TokenText) -> Pairs:
    keys = [at for at, special in enumerate(text.special) if special and at]
    return [(at, key) for at in content(text) for key in keys]


def _marks(text: TokenText) -> Pairs:
    keys = [at for at, mark in enumerate(text.punctuation) if mark]
    return [(at, key) for at in content(text) if not text.punctuation[at] for key in keys]


def _rarest(frequency: Counter[int], common: frozenset[int], text: TokenText) -> Pairs:
    """Towards the one rarest token, in a text that has one and is long enough to choose."""
    inside = content(text)
    if len(inside) < _FEWEST:
        return []
    least = min(frequency[text.ids[at]] for at in inside)
    rarest = [at for at in inside if frequency[text.ids[at]] == least]
    if len(rarest) > 1 or text.ids[rarest[0]] in common:
        return []
    return [(at, rarest[0]) for at in inside if at != rarest[0]]


def as_item(text: TokenText, roles: Sequence[Role]) -> Item:
    """A text as it is scored, with its pairs under every role.

    Raises:
        ArgumentError: a role gives a pair of what is not there.
    """
    units: dict[Grid, list[Sequence[int]]] = {
        "token": [(at,) for at in content(text)],
        "word": list(text.words),
        "mention": [text.tokens_in((one.start, one.end)) for one in text.text.mentions],
    }
    sizes = {grid: len(those) for grid, those in units.items()} | {"token": len(text.ids)}
    pairs = {role.name: sorted(set(role.pairs(text))) for role in roles}
    for role in roles:
        for pair in pairs[role.name]:
            if not all(0 <= at < sizes[role.grid] for at in pair):
                raise ArgumentError(
                    f"find_roles: {role.name!r} gives {pair} for a text of {sizes[role.grid]} "
                    f"{role.grid}s. Count them from 0."
                )
    return Item(text.ids, units, pairs, text.text.tags)
