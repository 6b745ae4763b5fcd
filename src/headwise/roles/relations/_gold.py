"""The relations that annotations tell of: trees, mentions, translations."""

from collections.abc import Sequence
from functools import partial

from headwise.roles.relations._relations import Pairs, Role
from headwise.roles.relations._tokens import TokenText

# Relations of Universal Dependencies that are no syntax, and the mark that most heads see.
_NOT_SYNTAX = {"root", "punct", "list", "discourse", "parataxis", "dep", "orphan"}
_NOT_SYNTAX |= {"goeswith", "reparandum", "vocative", "dislocated"}
_OF_TREES = 0.10  # Voita et al. 2019: ten points above the rule
_SUBJECT = "nsubj"


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
        bar=_OF_TREES,
        points=_OF_TREES,
    )
    down = Role(
        f"head → {name}",
        f"a word → its {name}",
        partial(_arcs, name, True),
        "word",
        bar=_OF_TREES,
        points=_OF_TREES,
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
                bar=_OF_TREES,
                points=_OF_TREES,
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
