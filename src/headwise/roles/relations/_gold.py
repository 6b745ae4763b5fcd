"""Roles from annotations: dependency trees, mentions, translations."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from headwise.corpora import AnnotatedText
from headwise.roles.relations._relations import Pairs, Role
from headwise.roles.relations._tokens import TokenText

# Relations of Universal Dependencies that are not syntactic, and punctuation.
_NOT_SYNTAX = {"root", "punct", "list", "discourse", "parataxis", "dep", "orphan"}
_NOT_SYNTAX |= {"goeswith", "reparandum", "vocative", "dislocated"}
_TREE_BAR = 0.10  # Voita et al. 2019: ten points above the best heuristic
_SUBJECT = "nsubj"
NEXT_NAME = "next name"


def gold_roles(texts: Sequence[TokenText]) -> list[Role]:
    """The roles from annotations, each in one direction: dependencies, mentions, translations."""
    names = dependencies_in({id(piece.text): piece.text for piece in texts}.values())
    roles = dependency_roles(names)
    roles += [role for role in _mention_roles() if any(map(role.pairs, texts))]
    own = {pair.relation for text in texts for pair in text.text.pairs}
    roles += [
        Role(name, f"a span → its {name}, as annotated", partial(_annotated, name), "word")
        for name in sorted(own)
    ]
    if any(text.text.links for text in texts):
        roles += [
            Role(
                "translation → source",
                "a word → the word that it translates",
                _links,
                "word",
                lexical=True,
            ),
            Role(
                "source → translation",
                "a word → the word that translates it",
                _sources,
                "word",
                lexical=True,
            ),
            Role(
                "next translation",
                "the word before a word → the source that that word will translate",
                _links_ahead,
                "word",
                ahead=True,
            ),
        ]
    return roles


def dependencies_in(texts: Iterable[AnnotatedText]) -> set[str]:
    """The names of the dependencies in the trees of texts."""
    return {_plain(arc.relation) for text in texts for arc in text.arcs}


def dependency_roles(names: Collection[str]) -> list[Role]:
    """The roles of the dependencies with these names, and those of agreement."""
    roles = [r for name in sorted(set(names) - _NOT_SYNTAX) for r in _dependency_roles(name)]
    return roles + _agreement_roles() if _SUBJECT in names else roles


def _annotated(name: str, text: TokenText) -> Pairs:
    return [(pair.query, pair.key) for pair in text.text.pairs if pair.relation == name]


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


def _mention_roles() -> Iterator[Role]:
    """The roles of mentions, which are choices: of a pronoun, of one kind, of what follows."""
    for query, says, candidates in (
        ("pronoun", "names", _names),
        ("mention", "earlier mentions", _earlier_mentions),
    ):
        gold = partial(_coreferent, candidates)
        yield Role(
            f"{query} → antecedent",
            f"a {query}, among all {says} → the one of the same entity",
            gold,
            "mention",
            score="choice",
            candidates=candidates,
        )
        yield Role(
            f"antecedent → {query}",
            f"among all {says}, the one of the same entity → the {query}",
            gold,
            "mention",
            score="choice",
            candidates=candidates,
            incoming=True,
        )
    yield Role(
        NEXT_NAME,
        "the token before a name, among names of which another one repeats → its earlier mention",
        _next_name,
        "mention",
        score="choice",
        candidates=_earlier_names,
        ahead=True,
        lexical=True,
    )


def next_names(text: TokenText) -> Iterator[tuple[int, int, list[int]]]:
    """Each name that has to follow: its mention, the token before it, and all earlier names.

    Its entity has one earlier mention, and another one has two or more. Pronouns do not count.
    """
    mentions = text.text.mentions
    names = [n for n, mention in enumerate(mentions) if not text.text.is_pronoun(mention)]
    for name in names:
        here = mentions[name]
        earlier = [other for other in names if mentions[other].end <= here.start]
        counts = Counter(mentions[other].entity for other in earlier)
        tokens = text.tokens_in((here.start, here.end))
        competes = counts[here.entity] == 1 < max(counts.values(), default=0)
        if competes and tokens and tokens[0] > 0:
            yield name, tokens[0] - 1, earlier


def _earlier_names(text: TokenText) -> list[tuple[tuple[int], int]]:
    return [((query,), name) for _, query, names in next_names(text) for name in names]


def _next_name(text: TokenText) -> list[tuple[tuple[int], int]]:
    mentions = text.text.mentions
    return [
        ((query,), other)
        for name, query, names in next_names(text)
        for other in names
        if mentions[other].entity == mentions[name].entity
    ]


def _names(text: TokenText) -> list[tuple[int, int]]:
    """Each pronoun with all mentions that are not pronouns, before it and after it."""
    pronoun = [text.text.is_pronoun(mention) for mention in text.text.mentions]
    indices = range(len(pronoun))
    return [(p, name) for p in indices if pronoun[p] for name in indices if not pronoun[name]]


def _earlier_mentions(text: TokenText) -> list[tuple[int, int]]:
    """Each mention with the earlier ones, if all are pronouns or none is."""
    mentions = text.text.mentions
    pronoun = [text.text.is_pronoun(mention) for mention in mentions]
    return [
        (later, earlier)
        for later in range(len(mentions))
        for earlier in range(len(mentions))
        if pronoun[later] == pronoun[earlier] and mentions[earlier].end <= mentions[later].start
    ]


def _coreferent(
    candidates: Callable[[TokenText], list[tuple[int, int]]], text: TokenText
) -> list[tuple[int, int]]:
    entity = [mention.entity for mention in text.text.mentions]
    return [(query, key) for query, key in candidates(text) if entity[query] == entity[key]]


def _links(text: TokenText) -> Pairs:
    return text.text.links


def _sources(text: TokenText) -> Pairs:
    return [(source, word) for word, source in text.text.links]


def _links_ahead(text: TokenText) -> Pairs:
    return [(word - 1, source) for word, source in text.text.links if word - 1 > source]
