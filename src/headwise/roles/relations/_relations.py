"""Relations: sets of (query, key) pairs of one text, over its tokens, words or mentions."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from reprlib import repr as shortened
from typing import Any, Literal

from headwise.errors import ArgumentError
from headwise.roles.relations._tokens import TokenText

Pairs = Iterable[tuple[int, int]]
# The units that are queries and keys: tokens, words or mentions, numbered within the text.
Grid = Literal["token", "word", "mention"]
GRIDS: tuple[Grid, ...] = ("token", "word", "mention")


@dataclass(frozen=True)
class Role:
    """A role that a head may have: a relation, and how attention to it is scored.

    Attributes:
        name: The name of the role.
        says: A description in words.
        pairs: Maps a text to its pairs (query, key) on the grid.
        grid: Whether pairs are of tokens, words or mentions.
        score: `top`, the share of queries whose largest weight among the candidates lies on
            the relation; `choice`, the same among candidates that the role names; `mass`, the
            attention weight on the relation; `entropy`, how even attention is over all keys: 0
            on a single key, 1 for equal weights; `content entropy`, the same over all keys but
            the first token and special tokens.
        kind: Which nulls apply.
        bar: The least lift over the strongest null, the share of the range above it.
        points: The least difference to the strongest null, from 0 to 1.
        ahead: Whether the role makes sense in causal models only.
        candidates: For `choice`, maps a text to its pairs (query, candidate).
        incoming: For `choice`, whether the candidates attend to the query: then its candidate
            with the largest weight on it is chosen. Pairs are (query, candidate) either way.
        lexical: Whether the words alone make the relation, whatever their order.
    """

    name: str
    says: str
    pairs: Callable[[TokenText], Pairs]
    grid: Grid = "token"
    score: Literal["top", "choice", "mass", "entropy", "content entropy"] = "top"
    kind: Literal["offset", "sink", "class", "breadth", "structure", "probe"] = "structure"
    bar: float = 0.25
    points: float = 0.0
    ahead: bool = False
    candidates: Callable[[TokenText], Pairs] | None = None
    incoming: bool = False
    lexical: bool = False

    @property
    def depends_on_order(self) -> bool:
        """Whether the same words in another order lose the relation."""
        return self.kind == "structure" and not self.lexical


@dataclass(frozen=True)
class Item:
    """A text with its units and relations, ready for evaluation.

    Attributes:
        ids: The tokens.
        units: The tokens of each unit of each grid. On the grid of tokens only those that may
            be candidates, in order.
        pairs: The pairs of units (query, key) of each role, by its name.
        tags: The part of speech of each word.
        candidates: The pairs (query, candidate) of each role that is a choice, by its name.
        mentions: The characters of each mention.
        text: The text that mentions are counted in.
    """

    ids: tuple[int, ...]
    units: Mapping[Grid, Sequence[Sequence[int]]]
    pairs: Mapping[str, Sequence[tuple[int, int]]]
    tags: Sequence[str] = ()
    candidates: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    mentions: Sequence[str] = ()
    text: str = ""


# Where attention goes in every text alike, and how it spreads: shapes of attention, not roles.
SINKS = ("first token", "separator")
DIFFUSE, DIFFUSE_BESIDE_SINKS = "diffuse", "diffuse beside sinks"
SHAPES = (*SINKS, DIFFUSE, DIFFUSE_BESIDE_SINKS)
EVEN = 0.85  # of the entropy of even attention: from here on attention is diffuse
_FARTHEST = 5  # tokens
_COMMON = 500  # most frequent tokens, which are never rare
_FEWEST = 5  # content tokens that a text needs to have a rarest one
_NEAR = {-1: "previous token", 0: "self", 1: "next token"}


def content(text: TokenText) -> list[int]:
    """The positions of the tokens that are not special."""
    return [position for position, special in enumerate(text.special) if not special]


def token_roles(texts: Sequence[TokenText]) -> list[Role]:
    """The roles that need no annotation: offsets, sinks, separators, rare tokens, evenness."""
    return roles_of_frequency(Counter(token for text in texts for token in text.ids))


def roles_of_frequency(frequency: Counter[int]) -> list[Role]:
    """The roles that need no annotation, from how often each token occurs in all texts."""
    ranked = [token for token, _ in frequency.most_common()]
    common = frozenset(ranked[: min(_COMMON, len(frequency) // 2)])
    return [
        *_offsets(),
        *_sinks(),
        Role("punctuation", "a token → punctuation", _punctuation, score="mass", kind="class"),
        Role(
            "rare token",
            "a token → the rarest token of the text",
            partial(_rarest, frequency, common),
            kind="class",
        ),
        *_breadths(),
    ]


def _sinks() -> list[Role]:
    first, separator = SINKS
    says = "a token → special tokens after the first"
    return [
        Role(first, "a token → the first token", _first, score="mass", kind="sink"),
        Role(separator, says, _separators, score="mass", kind="sink"),
    ]


def _breadths() -> list[Role]:
    """Evenness is compared with its limit alone, so no lift is needed."""
    even = "a token → all visible tokens, evenly"
    beside = "a token → all visible tokens that are not sinks, evenly"
    return [
        Role(DIFFUSE, even, partial(_offset, 0), score="entropy", kind="breadth", bar=0.0),
        Role(
            DIFFUSE_BESIDE_SINKS,
            beside,
            _behind_two,
            score="content entropy",
            kind="breadth",
            bar=0.0,
        ),
    ]


def _behind_two(text: TokenText) -> Pairs:
    """Queries that see two tokens or more that are not sinks, in a causal model as well."""
    return [(query, query) for query in content(text)[2:]]


def _offsets() -> list[Role]:
    offsets = range(-_FARTHEST, _FARTHEST + 1)
    nearest_first = sorted(offsets, key=lambda offset: (abs(offset), offset))
    return [
        Role(
            _NEAR.get(offset, f"offset {offset:+d}"),
            f"a token → {_target(offset)}",
            partial(_offset, offset),
            kind="offset",
        )
        for offset in nearest_first
    ]


def _target(offset: int) -> str:
    if offset == 0:
        return "itself"
    side = "before" if offset < 0 else "after"
    return f"the token {side} it" if abs(offset) == 1 else f"{abs(offset)} tokens {side} it"


def _offset(offset: int, text: TokenText) -> Pairs:
    queries = content(text)
    keys = set(queries)
    return [(query, query + offset) for query in queries if query + offset in keys]


def _first(text: TokenText) -> Pairs:
    return [(query, 0) for query in content(text) if query]


def _separators(text: TokenText) -> Pairs:
    keys = [position for position, special in enumerate(text.special) if special and position]
    return [(query, key) for query in content(text) for key in keys]


def _punctuation(text: TokenText) -> Pairs:
    keys = [position for position, mark in enumerate(text.punctuation) if mark]
    queries = [query for query in content(text) if not text.punctuation[query]]
    return [(query, key) for query in queries for key in keys]


def _rarest(frequency: Counter[int], common: frozenset[int], text: TokenText) -> Pairs:
    """Pairs with the single rarest token as key, in a text that has one and is long enough."""
    positions = content(text)
    if len(positions) < _FEWEST:
        return []
    least = min(frequency[text.ids[position]] for position in positions)
    rarest = [position for position in positions if frequency[text.ids[position]] == least]
    if len(rarest) > 1 or text.ids[rarest[0]] in common:
        return []
    return [(query, rarest[0]) for query in positions if query != rarest[0]]


def as_item(text: TokenText, roles: Sequence[Role]) -> Item:
    """Turn a text into an item, with its pairs of every role.

    Raises:
        ArgumentError: a role returns a pair outside the text.
    """
    units: dict[Grid, list[Sequence[int]]] = {
        "token": [(position,) for position in content(text)],
        "word": list(text.words),
        "mention": [text.tokens_in((mention.start, mention.end)) for mention in text.text.mentions],
    }
    sizes = {grid: len(members) for grid, members in units.items()} | {"token": len(text.ids)}
    pairs = {role.name: _pairs_of(role, text) for role in roles}
    candidates = {
        role.name: sorted({*role.candidates(text), *pairs[role.name]})
        for role in roles
        if role.candidates is not None
    }
    for role in roles:
        for pair in candidates.get(role.name, pairs[role.name]):
            if not all(0 <= unit < sizes[role.grid] for unit in pair):
                raise ArgumentError(
                    f"find_roles: {role.name!r} gives {pair} for a text of {sizes[role.grid]} "
                    f"{role.grid}s. Count them from 0."
                )
    whole = text.text
    mentions = [whole.text[mention.start : mention.end] for mention in whole.mentions]
    return Item(text.ids, units, pairs, whole.tags, candidates, mentions, whole.text)


def _pairs_of(role: Role, text: TokenText) -> list[tuple[int, int]]:
    """The distinct pairs of a role in a text, in order.

    Raises:
        ArgumentError: the role returns something other than pairs of whole numbers.
    """
    result: Any = role.pairs(text)
    try:
        return sorted({(index(query), index(key)) for query, key in result})
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"find_roles: {role.name!r} returns {shortened(result)} for the text "
            f"{shortened(text.text.text)}. Return pairs of positions: (query, key)."
        ) from error
