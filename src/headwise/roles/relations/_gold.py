"""Roles from annotations: dependency trees, mentions, translations."""

from collections.abc import Sequence
from functools import partial

from headwise.roles.relations._relations import Pairs, Role
from headwise.roles.relations._tokens import TokenText

# Relations of Universal Dependencies that are not syntactic, and punctuation.
_NOT_SYNTAX = {"root", "punct", "list", "discourse", "parataxis", "dep", "orphan"}
_NOT_SYNTAX |= {"goeswith", "reparandum", "vocative", "dislocated"}
_TREE_BAR = 0.10  # Voita et al. 2019: ten points above the best heuristic
_SUBJECT = "nsubj"


def gold_roles(texts: Sequence[TokenText]) -> list[Role]:
    """The roles from annotations: dependencies both ways, mentions, translations."""
    names = {
        _plain(arc.relation)
        for text in {id(piece.text): piece.text for piece in texts}.values()
        for arc in text.arcs
    }
    roles = [role for name in sorted(names - _NOT_SYNTAX) for role in _dependency_roles(name)]
    if _SUBJECT in names:
        roles += _agreement_roles()
    if any(text.text.mentions for text in texts):
        roles.append(
            Role("coreference", "a mention → another of the same entity", _same_entity, "mention")
        )
    if any(text.text.links for text in texts):
        roles += [
            Role("translation", "a word → the word that it translates", _links, "word"),
            Role(
                "next translation",
                "the word before a word → the source that that word will translate",
                _links_ahead,
                "word",
                ahead=True,
            ),
        ]
    return roles


def _dependency_roles(name: str) -> tuple[Role, Role]:
    """The roles of a dependency: from dependent to head, and from head to dependent."""
    up = Role(
        f"{name} → head",
        f"a word → the word whose {name} it is",
        partial(_arcs, name, False),
        "word",
        bar=_TREE_BAR,
        points=_TREE_BAR,
    )
    down = Role(
        f"head → {name}",
        f"a word → its {name}",
        partial(_arcs, name, True),
        "word",
        bar=_TREE_BAR,
        points=_TREE_BAR,
    )
    return up, down


def _agreement_roles() -> list[Role]:
    """Roles that agreement may use: at the verb, and where a decoder predicts the verb.

    Each role exists for adjacent and for separated subject and verb as well, because a fixed
    distance explains either case, but not both.
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
                bar=_TREE_BAR,
                points=_TREE_BAR,
            ),
        ]
    return roles


def _subject(apart: bool, text: TokenText) -> Pairs:
    return [pair for pair in _arcs(_SUBJECT, True, text) if (abs(pair[0] - pair[1]) > 1) == apart]


def _subject_ahead(apart: Sequence[bool], text: TokenText) -> Pairs:
    """Pairs from the token before the verb to its subject, for subjects before their verb."""
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
    return [(head, dependent) for dependent, head in arcs] if down else arcs


def _same_entity(text: TokenText) -> Pairs:
    mentions = list(enumerate(text.text.mentions))
    return [
        (query, key)
        for query, mention in mentions
        for key, antecedent in mentions
        if query != key and mention.entity == antecedent.entity
    ]


def _links(text: TokenText) -> Pairs:
    return text.text.links


def _links_ahead(text: TokenText) -> Pairs:
    return [(word - 1, source) for word, source in text.text.links if word - 1 > source]
