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
        ahead: Whether it makes sense only where no head may look ahead.
    """

    name: str
    says: str
    pairs: Callable[[TokenText], Pairs]
    grid: Grid = "token"
    score: Literal["top", "mass", "entropy"] = "top"
    kind: Literal["offset", "sink", "class", "breadth", "structure", "probe"] = "structure"
    bar: float = 0.25
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


# Relations of Universal Dependencies that are no syntax, and the mark that most heads see.
_NOT_SYNTAX = {"root", "punct", "list", "discourse", "parataxis", "dep", "orphan"}
_NOT_SYNTAX |= {"goeswith", "reparandum", "vocative", "dislocated"}
_BAR_OF_TREES = 0.10  # Voita et al. 2019: ten points above the rule
_SUBJECT = "nsubj"
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
    offsets = sorted(range(-_FARTHEST, _FARTHEST + 1), key=lambda by: (abs(by), by))
    roles = [
        Role(
            _NEAR.get(by, f"offset {by:+d}"),
            f"a token → {_where(by)}",
            partial(_offset, by),
            kind="offset",
        )
        for by in offsets
    ]
    known = {at for text in texts for at in text.ids}
    frequency = Counter(one for text in texts for one in text.ids)
    ranked = [one for one, _ in frequency.most_common()]
    common = frozenset(ranked[: min(_COMMON, len(known) // 2)])
    return [
        *roles,
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


def gold_roles(texts: Sequence[TokenText]) -> list[Role]:
    """The roles that annotations tell of: dependencies both ways, mentions, translations."""
    names = {
        _plain(arc.relation)
        for text in {id(t.text): t.text for t in texts}.values()
        for arc in text.arcs
    }
    roles = [role for name in sorted(names - _NOT_SYNTAX) for role in _of_relation(name)]
    if _SUBJECT in names:
        roles += _of_agreement()
    if any(text.text.mentions for text in texts):
        roles.append(
            Role("coreference", "a mention → another of the same entity", _same_entity, "mention")
        )
    if any(text.text.links for text in texts):
        roles += [
            Role("translation", "a word → the word that it translates", _links, "word"),
            Role(
                "next translation",
                "the word before a word → what that word will translate",
                _links_ahead,
                "word",
                ahead=True,
            ),
        ]
    return roles


def _of_relation(name: str) -> tuple[Role, Role]:
    """A dependency both ways."""
    up = Role(
        f"{name} → head",
        f"a word → the word whose {name} it is",
        partial(_arcs, name, False),
        "word",
        bar=_BAR_OF_TREES,
    )
    down = Role(
        f"head → {name}",
        f"a word → its {name}",
        partial(_arcs, name, True),
        "word",
        bar=_BAR_OF_TREES,
    )
    return up, down


def _of_agreement() -> list[Role]:
    """Where agreement may be read: at the verb, and where a decoder must say the verb.

    Each again with something between subject and verb, and without: a fixed distance explains
    either, but not both.
    """
    roles = [
        Role(
            "next subject",
            "the token before a verb → the subject of that verb",
            partial(_subject_ahead, (False, True)),
            ahead=True,
        )
    ]
    for apart, where in ((False, "beside"), (True, "apart")):
        between = "with something between them" if apart else "that stands beside it"
        roles += [
            Role(
                f"next subject, {where}",
                f"the token before a verb → the subject of that verb, {between}",
                partial(_subject_ahead, (apart,)),
                ahead=True,
            ),
            Role(
                f"head → {_SUBJECT}, {where}",
                f"a word → its {_SUBJECT}, {between}",
                partial(_subject, apart),
                "word",
                bar=_BAR_OF_TREES,
            ),
        ]
    return roles


def _subject(apart: bool, text: TokenText) -> Pairs:
    return [pair for pair in _arcs(_SUBJECT, True, text) if (abs(pair[0] - pair[1]) > 1) == apart]


def _subject_ahead(apart: Sequence[bool], text: TokenText) -> Pairs:
    """From the token before the verb; a subject that follows its verb says nothing there."""
    words = text.words
    return [
        (words[verb][0] - 1, token)
        for verb, subject in _arcs(_SUBJECT, True, text)
        if subject < verb and (verb - subject > 1) in apart and words[verb]
        for token in words[subject]
    ]


def _plain(relation: str) -> str:
    """A relation without its subtype: `nsubj:pass` is `nsubj`."""
    return relation.partition(":")[0]


def _arcs(name: str, down: bool, text: TokenText) -> list[tuple[int, int]]:
    arcs = [(arc.dependent, arc.head) for arc in text.text.arcs if _plain(arc.relation) == name]
    return [(head, one) for one, head in arcs] if down else arcs


def _same_entity(text: TokenText) -> Pairs:
    known = list(enumerate(text.text.mentions))
    return [
        (at, other)
        for at, one in known
        for other, another in known
        if at != other and one.entity == another.entity
    ]


def _links(text: TokenText) -> Pairs:
    return text.text.links


def _links_ahead(text: TokenText) -> Pairs:
    return [(one - 1, other) for one, other in text.text.links if one - 1 > other]


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
