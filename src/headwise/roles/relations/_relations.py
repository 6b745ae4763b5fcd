"""Relations: sets of (query, key) pairs of one text, over its tokens, words or mentions.

A further relation is a function from a text to its pairs, and a `Role` that names it in the list
of `token_roles` (or of `_gold.gold_roles`, if it needs annotations).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from operator import index
from reprlib import repr as shortened
from typing import Any, Literal, get_args

from headwise.errors import ArgumentError
from headwise.roles.relations._tokens import TokenText

Pairs = Iterable[tuple[int, int]]
# An end of a choice of your own: a token, or the tokens of a phrase.
End = int | Iterable[int]
# The nodes that are queries and keys: tokens, words or mentions, numbered within the text.
Level = Literal["token", "word", "mention"]
LEVELS: tuple[Level, ...] = ("token", "word", "mention")
Score = Literal["top", "choice", "mass", "entropy", "content entropy"]
Kind = Literal["offset", "sink", "class", "breadth", "structure", "probe"]


@dataclass(frozen=True)
class Role:
    """A role that a head may have: a relation, and how attention to it is scored.

    `relations={name: Role(...)}` of `find_roles` tests one of your own.

    Attributes:
        name: The name of the role.
        says: A description in words.
        pairs: Maps a text to its pairs (query, key) on the level. On the level of mentions an end
            is the number of an annotated mention, or the tokens of another phrase.
        level: Whether pairs are of tokens, words or mentions.
        score: `top`, the share of queries whose largest weight among the candidates lies on
            the relation; `choice`, the same among candidates that the role names; `mass`, the
            attention weight on the relation; `entropy`, how evenly attention spreads over all
            keys: 0 on a single key, 1 for equal weights; `content entropy`, the same over all keys
            but the first token and special tokens.
        kind: Which nulls apply. `probe` is for the library's own sequences of random tokens.
        bar: The least lift over the strongest null, the share of the range above it.
        points: The least difference to the strongest null, from 0 to 1.
        ahead: Whether the role makes sense in causal models only.
        candidates: For `choice`, maps a text to its pairs (query, candidate).
        incoming: For `choice`, whether the candidates attend to the query: then its candidate
            with the largest weight on it is chosen. Pairs are (query, candidate) either way.
        lexical: Whether the words alone make the relation, whatever their order.
    Raises:
        ArgumentError: the name is empty, `pairs` or `candidates` are no functions, `bar` or
            `points` no numbers from 0 to 1, the score, the kind or the level is unknown, a choice
            has no candidates, or another score has some.
    """

    name: str
    says: str
    pairs: Callable[[TokenText], Iterable[tuple[Any, Any]]]
    level: Level = "token"
    score: Score = "top"
    kind: Kind = "structure"
    bar: float = 0.25
    points: float = 0.0
    ahead: bool = False
    candidates: Callable[[TokenText], Iterable[tuple[Any, Any]]] | None = None
    incoming: bool = False
    lexical: bool = False

    def __post_init__(self) -> None:
        for name, known in (("score", Score), ("kind", Kind), ("level", Level)):
            value = getattr(self, name)
            if value not in get_args(known):
                raise ArgumentError(
                    f"Role: {name}={shortened(value)}. Choose one of "
                    f"{', '.join(map(repr, get_args(known)))}."
                )
        given: dict[str, Any] = vars(self)
        if not isinstance(given["name"], str):  # empty: a mapping of roles names it
            raise ArgumentError(f"Role: name={shortened(self.name)}. Give a name in letters.")
        for name in ("pairs", "candidates"):
            if not callable(given[name]) and (name == "pairs" or given[name] is not None):
                raise ArgumentError(
                    f"Role: {name}={shortened(given[name])}. Give a function from a text to pairs."
                )
        for name in ("bar", "points"):
            if not isinstance(given[name], Real) or not 0 <= given[name] <= 1:
                raise ArgumentError(
                    f"Role: {name}={shortened(given[name])}. Give a number from 0 to 1."
                )
        if (self.score == "choice") != (self.candidates is not None):
            raise ArgumentError(
                f"Role: score={self.score!r} with candidates={shortened(self.candidates)}. Give "
                f"candidates for score='choice', and for no other score."
            )

    @property
    def depends_on_order(self) -> bool:
        """Whether the same words in another order lose the relation."""
        return self.kind == "structure" and not self.lexical


@dataclass(frozen=True)
class ChoiceRelation:
    """A relation of your own that is a choice: which candidate of a query is a right one.

    A head is right where, among the candidates of a query, a right one has the largest weight.
    The baselines choose as well: the nearest candidate, the first, the longest, the one that
    occurs most often in the text, and the best place before or after the query.

    Both functions map a text to pairs (query, candidate). Either end is a token, or the tokens of
    a phrase, as `text.words[n]` and `text.tokens_in((start, end))` have them. Attention is
    averaged over the tokens of the end that attends; of those of the other end the largest weight
    counts, since a sum would favor long phrases. A pair with an end without tokens is left out,
    and so is a query whose candidates are all right, or all wrong.

    Attributes:
        pairs: The right choices.
        candidates: Every pair to choose from, the right ones included.
        incoming: Whether the candidates attend to the query, and not the query to them.
    Raises:
        ArgumentError: one of them is no function.
    Source:
        Clark et al. 2019, section 4.3, for candidates that are mentions.
    """

    pairs: Callable[[TokenText], Iterable[tuple[End, End]]]
    candidates: Callable[[TokenText], Iterable[tuple[End, End]]]
    incoming: bool = False

    def __post_init__(self) -> None:
        for name, function in (("pairs", self.pairs), ("candidates", self.candidates)):
            if not callable(function):
                raise ArgumentError(
                    f"ChoiceRelation: {name} is {shortened(function)}. Give a function from a "
                    f"TokenText to pairs (query, candidate)."
                )

    def role(self, name: str) -> Role:
        """The role that is this choice."""
        return Role(
            name,
            f"your relation {name}",
            partial(_phrases, self.pairs),
            "mention",
            score="choice",
            candidates=partial(_phrases, self.candidates),
            incoming=self.incoming,
        )


def _phrases(function: Callable[[TokenText], Any], text: TokenText) -> Any:
    """The pairs of a function, each end as the tokens of a phrase; others as they are."""
    result = function(text)
    pairs = list(result) if isinstance(result, Iterable) else result
    try:
        return [tuple(map(_phrase, pair)) for pair in pairs]
    except TypeError:
        return pairs


def _phrase(end: Any) -> tuple[int, ...]:
    return tuple(sorted({*map(index, end)})) if isinstance(end, Iterable) else (index(end),)


# A relation of your own: a function from a text to its pairs of tokens, a choice, or a role.
Relation = Callable[[TokenText], Pairs] | ChoiceRelation | Role
Relations = Mapping[str, Relation]


def own_roles(who: str, relations: Relations) -> list[Role]:
    """The roles of the user's own relations."""
    if not isinstance(relations, Mapping) or not all(
        isinstance(relation, ChoiceRelation | Role) or callable(relation)
        for relation in relations.values()
    ):
        raise ArgumentError(
            f"{who}: relations is {shortened(relations)}. Give functions by name, or a "
            f"ChoiceRelation or a Role: relations={{'name': function}}."
        )
    roles = []
    for name, relation in relations.items():
        if isinstance(relation, ChoiceRelation):
            roles.append(relation.role(name))
        elif isinstance(relation, Role):
            if relation.kind == "probe":
                raise ArgumentError(
                    f"{who}: {name} is of kind='probe', which is for sequences of random tokens. "
                    f"Choose another kind."
                )
            roles.append(replace(relation, name=name))
        else:
            roles.append(Role(name, f"your relation {name}", relation))
    return roles


# Where attention goes in every text alike, and how it spreads: shapes of attention, not roles.
SINKS = ("first token", "separator")
DIFFUSE, DIFFUSE_BESIDE_SINKS = "diffuse", "diffuse beside sinks"
SHAPES = (*SINKS, DIFFUSE, DIFFUSE_BESIDE_SINKS)
EVEN = 0.85  # of the entropy of uniform attention: from here on attention is diffuse
_FARTHEST = 5  # tokens
_COMMON = 500  # most frequent tokens, which are never rare
_FEWEST = 5  # content tokens that a text needs to have a rarest one
_NEAR = {-1: "previous token", 0: "self", 1: "next token"}
# The roles of one place beside the query, the nearest first.
OFFSETS = {
    _NEAR.get(offset, f"offset {offset:+d}"): offset
    for offset in sorted(range(-_FARTHEST, _FARTHEST + 1), key=lambda offset: (abs(offset), offset))
}


def content(text: TokenText) -> list[int]:
    """The positions of the tokens that are not special."""
    return [position for position, special in enumerate(text.special) if not special]


def token_roles(texts: Sequence[TokenText]) -> list[Role]:
    """The roles that need no annotation: offsets, sinks, separators, rare tokens, evenness."""
    frequency = Counter(token for text in texts for token in text.ids)
    ranked = [token for token, _ in frequency.most_common()]
    common = frozenset(ranked[: min(_COMMON, len(frequency) // 2)])
    first, separator = SINKS
    of_sinks = partial(Role, score="mass", kind="sink")
    # Evenness is compared with its limit alone, so no lift is needed.
    of_evenness = partial(Role, kind="breadth", bar=0.0)
    rarest = partial(_rarest, frequency, common)
    beside = "a token → all visible tokens that are not sinks, evenly"
    return [
        *_offsets(),
        of_sinks(first, "a token → the first token", _first),
        of_sinks(separator, "a token → special tokens after the first", _separators),
        Role("punctuation", "a token → punctuation", _punctuation, score="mass", kind="class"),
        Role("rare token", "a token → the rarest token of the text", rarest, kind="class"),
        of_evenness(
            DIFFUSE, "a token → all visible tokens, evenly", partial(_offset, 0), score="entropy"
        ),
        of_evenness(DIFFUSE_BESIDE_SINKS, beside, _behind_two, score="content entropy"),
    ]


def _behind_two(text: TokenText) -> Pairs:
    """Queries that see two tokens or more that are not sinks, in a causal model as well."""
    return [(query, query) for query in content(text)[2:]]


def _offsets() -> list[Role]:
    return [
        Role(name, f"a token → {_target(offset)}", partial(_offset, offset), kind="offset")
        for name, offset in OFFSETS.items()
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
