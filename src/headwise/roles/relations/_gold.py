"""Roles from annotations: dependency trees, mentions, pairs, translations."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

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
    whole = {id(piece.text): piece.text for piece in texts}.values()
    roles = _dependency_roles(
        {_without_subtype(arc.relation) for text in whole for arc in text.arcs}
    )
    roles += [role for role in _mention_roles() if any(map(role.pairs, texts))]
    own = {pair.relation for text in texts for pair in text.text.pairs}
    roles += [
        Role(name, f"a span → its {name}, as annotated", partial(_annotated, name), "word")
        for name in sorted(own)
    ]
    if any(text.links for text in whole):
        of_words = partial(Role, level="word")
        roles += [
            of_words("translation → source", "a word → the word that it translates",
                     lambda text: text.text.links, lexical=True),
            of_words("source → translation", "a word → the word that translates it",
                     lambda text: [pair[::-1] for pair in text.text.links], lexical=True),
            of_words("next translation",
                     "the word before a word → the source that that word will translate",
                     _links_ahead, ahead=True),
        ]  # fmt: skip
    return roles


def _annotated(name: str, text: TokenText) -> Pairs:
    return [(pair.query, pair.key) for pair in text.text.pairs if pair.relation == name]


def _without_subtype(relation: str) -> str:
    """`nsubj:pass` is `nsubj`."""
    return relation.partition(":")[0]


def _dependency_roles(names: Collection[str]) -> list[Role]:
    """The roles of the dependencies with these names in both directions, and those of agreement.

    Roles that agreement may use are at the verb, and where a decoder predicts the verb. Each
    exists for adjacent and for separated subject and verb as well, because a fixed distance
    explains either case, but not both.
    """

    def of_trees(name: str, says: str, pairs: Callable[[TokenText], Pairs]) -> Role:
        return Role(name, says, pairs, "word", bar=_TREE_BAR, points=_TREE_BAR)

    roles = []
    for name in sorted(set(names) - _NOT_SYNTAX):
        up, down = partial(_arcs, name, False), partial(_arcs, name, True)
        roles.append(of_trees(f"{name} → head", f"a word → the word whose {name} it is", up))
        roles.append(of_trees(f"head → {name}", f"a word → its {name}", down))
    if _SUBJECT not in names:
        return roles
    says = "the token before a verb → the subject of that verb"
    ahead = partial(_subject_ahead, (False, True))
    roles.append(Role("next subject", says, ahead, ahead=True))
    for apart, where, between in (
        (False, "beside", "that stands beside it"),
        (True, "apart", "with something between them"),
    ):
        ahead, of_verb = partial(_subject_ahead, (apart,)), partial(_subject, apart)
        roles.append(Role(f"next subject, {where}", f"{says}, {between}", ahead, ahead=True))
        name, of_head = f"head → {_SUBJECT}, {where}", f"a word → its {_SUBJECT}, {between}"
        roles.append(of_trees(name, of_head, of_verb))
    return roles


def _arcs(name: str, down: bool, text: TokenText) -> list[tuple[int, int]]:
    arcs = [arc for arc in text.text.arcs if _without_subtype(arc.relation) == name]
    return [(arc.head, arc.dependent) if down else (arc.dependent, arc.head) for arc in arcs]


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


def _mention_roles() -> Iterator[Role]:
    """The roles of mentions, which are choices: of a pronoun, of one kind, of what follows."""
    choice = partial(Role, level="mention", score="choice")
    for query, among, candidates in (
        ("pronoun", "names", _names),
        ("mention", "earlier mentions", _earlier_mentions),
    ):
        gold = partial(_coreferent, candidates)
        there = f"a {query}, among all {among} → the one of the same entity"
        back = f"among all {among}, the one of the same entity → the {query}"
        yield choice(f"{query} → antecedent", there, gold, candidates=candidates)
        yield choice(f"antecedent → {query}", back, gold, candidates=candidates, incoming=True)
    says = "the token before a name, among names of which another one repeats → its earlier mention"
    yield choice(NEXT_NAME, says, _next_name, candidates=_earlier_names, ahead=True, lexical=True)


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
        # Here a head that looks at names which repeat is wrong, so that it cannot pass for one that
        # knows which name follows.
        competes = counts[here.entity] == 1 < max(counts.values(), default=0)
        if competes and tokens and tokens[0] > 0:
            yield name, tokens[0] - 1, earlier


def _earlier_names(text: TokenText) -> list[tuple[tuple[int], int]]:
    return [((query,), name) for _, query, names in next_names(text) for name in names]


def _next_name(text: TokenText) -> list[tuple[tuple[int], int]]:
    entity = [mention.entity for mention in text.text.mentions]
    return [
        ((query,), other)
        for name, query, names in next_names(text)
        for other in names
        if entity[other] == entity[name]
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


def _links_ahead(text: TokenText) -> Pairs:
    return [(word - 1, source) for word, source in text.text.links if word - 1 > source]
