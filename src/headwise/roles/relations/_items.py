"""Items with the pairs of every role: texts, and random sequences that repeat.

Each has a contrast: a text with its words in another order, or a sequence that does not repeat.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import index
from reprlib import repr as shortened
from typing import Any
from zlib import crc32

import numpy as np
from jaxtyping import Bool

from headwise.errors import ArgumentError
from headwise.roles.relations._gold import NEXT_NAME
from headwise.roles.relations._relations import LEVELS, Level, Role, content, token_roles
from headwise.roles.relations._tokens import TokenText

# The tokens of a prefix, of a period, and of a sequence, in which the longest period comes four
# times. Prefix and period are drawn, so that neither a place nor a distance predicts a copy.
_PREFIX, _PERIOD, _LONGEST = (0, 8), (5, 24), 96

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
# The names of all roles that need no relation or annotation of one's own.
BUILT_IN = (NEXT_NAME, *(role.name for role in (*token_roles(()), *PROBED)))


@dataclass(frozen=True)
class Item:
    """A text with its nodes and relations, ready for evaluation.

    Attributes:
        ids: The tokens.
        nodes: The tokens of each node of each level. On the level of tokens only those that may
            be candidates, in order; mentions are followed by the phrases of other choices.
        pairs: The pairs of nodes (query, key) of each role, by its name.
        tags: The part of speech of each word.
        candidates: The pairs (query, candidate) of each role that is a choice, by its name.
        mentions: The characters of each node of the level of mentions.
        text: The text that mentions are counted in.
        usual_keys: For rules in texts without tags: the nodes of each level with the tokens of a
            key, by the name of the class.
    """

    ids: tuple[int, ...]
    nodes: Mapping[Level, Sequence[Sequence[int]]]
    pairs: Mapping[str, Sequence[tuple[int, int]]]
    tags: Sequence[str] = ()
    candidates: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    mentions: Sequence[str] = ()
    text: str = ""
    usual_keys: Mapping[Level, Mapping[str, Sequence[int]]] = field(default_factory=dict)


def as_item(text: TokenText, roles: Sequence[Role]) -> Item:
    """Turn a text into an item, with its pairs of every role."""
    whole = text.text
    spans = [(mention.start, mention.end) for mention in whole.mentions]
    nodes: dict[Level, list[Sequence[int]]] = {
        "token": [(position,) for position in content(text)],
        "word": list(text.words),
        "mention": [text.tokens_in(span) for span in spans],
    }
    sizes = {level: len(of_level) for level, of_level in nodes.items()} | {"token": len(text.ids)}
    chooses = [role for role in roles if role.candidates is not None]
    named = {role.name: _named_pairs(text, role, "pairs", sizes) for role in roles}
    among = {role.name: _named_pairs(text, role, "candidates", sizes) for role in chooses}
    # A phrase that a role names becomes a mention, after the annotated ones.
    of_roles = (*named.values(), *among.values())
    ends = (end for pairs in of_roles for pair in pairs for end in pair)
    phrases = list(dict.fromkeys(end for end in ends if isinstance(end, tuple)))
    number = {phrase: node for node, phrase in enumerate(phrases, len(spans))}
    nodes["mention"] += phrases
    spans += [(text.spans[phrase[0]][0], text.spans[phrase[-1]][1]) for phrase in phrases]
    mentions = [whole.text[start:end] for start, end in spans]
    mentions[len(whole.mentions) :] = map(str.strip, mentions[len(whole.mentions) :])
    pairs, candidates = (
        {
            name: sorted((number.get(query, query), number.get(key, key)) for query, key in of_role)
            for name, of_role in which.items()
        }
        for which in (named, among)
    )
    for name, of_role in candidates.items():
        if missing := sorted({*pairs[name]} - {*of_role}):
            query, key = (tuple(nodes["mention"][node]) for node in missing[0])
            raise ArgumentError(
                f"find_roles: {name!r} gives the tokens {(query, key)} as a right "
                f"choice, and not as a candidate, for the text {shortened(whole.text)}. Let "
                f"candidates return every pair to choose from, the right ones included."
            )
    return Item(text.ids, nodes, pairs, whole.tags, candidates, mentions, whole.text)


def _named_pairs(
    text: TokenText, role: Role, part: str, sizes: Mapping[Level, int]
) -> list[tuple[Any, Any]]:
    """The distinct pairs of a role in order; an end is the number of a node, or a phrase."""
    where = f"for the text {shortened(text.text.text)}"
    try:
        result = getattr(role, part)(text)
        result = [*result] if isinstance(result, Iterator) else result  # runs a generator
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        raise ArgumentError(
            f"find_roles: {part} of {role.name!r} fail ({type(error).__name__}: {error}) {where}. "
            f"Correct the function."
        ) from error
    try:
        pairs = sorted({(_end(query, role), _end(key, role)) for query, key in result})
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"find_roles: {role.name!r} returns {shortened(result)} {where}. Return pairs of "
            f"positions: (query, key)."
        ) from error
    pairs = [pair for pair in pairs if () not in pair]
    for pair in pairs:
        for end in pair:
            level: Level = "token" if isinstance(end, tuple) else role.level
            size = sizes[level]
            if not all(0 <= node < size for node in (end if isinstance(end, tuple) else (end,))):
                raise ArgumentError(
                    f"find_roles: {role.name!r} gives {pair} for a text of {size} {level}s. Count "
                    f"them from 0."
                )
    return pairs


def _end(end: Any, role: Role) -> Any:
    return end if isinstance(end, tuple) and role.level == "mention" else index(end)


def with_usual_keys(
    items: Sequence[Item], roles: Sequence[Role], selected: Bool[np.ndarray, " P"]
) -> tuple[list[Item], list[str]]:
    """Classes for texts without parts of speech: the nodes that have the tokens of a usual key.

    The usual keys of a relation are the tokens, or words, that are keys in the selected items.
    Without them the rule that beats most relations, the nearest word of the right kind, could not
    be stated for such texts.

    Returns:
        The same items with their usual keys, and the names of these classes.
    """
    named = [(item, {level: _ids_of_nodes(item, level) for level in LEVELS}) for item in items]
    classes: list[tuple[Level, str, set[tuple[int, ...]]]] = []
    for role in roles:
        if role.kind == "structure" and role.level != "mention":
            keys = {
                ids[role.level][key]
                for item, ids in compress(named, selected)
                for _, key in item.pairs[role.name]
                if key in ids[role.level]  # a special token is no candidate
            }
            classes.append((role.level, f"usual key of {role.name}", keys))
    classed = []
    for item, ids in named:
        usual: dict[Level, dict[str, list[int]]] = {level: {} for level in LEVELS}
        for level, name, keys in classes:
            usual[level][name] = [node for node, of_node in ids[level].items() if of_node in keys]
        classed.append(replace(item, usual_keys=usual))
    return classed, [name for _, name, _ in classes]


def _ids_of_nodes(item: Item, level: Level) -> dict[int, tuple[int, ...]]:
    nodes = item.nodes[level]
    numbered = ((of[0], of) for of in nodes) if level == "token" else enumerate(nodes)
    return {node: tuple(item.ids[token] for token in of) for node, of in numbered if of}


def shuffled(items: Sequence[Item], roles: Sequence[Role], seed: int = 0) -> list[Item]:
    """The same texts with their words in another order; pairs and nodes move with their words.

    The tokens of a word stay together, as do those of a mention; special tokens keep their places.
    The order of a text depends on its tokens and the seed, not on the other texts.
    """
    token_roles = {role.name for role in roles if role.level == "token"}
    moved = []
    for item in items:
        tokens = crc32(np.array(item.ids, dtype="<i8").tobytes())
        moved.append(_shuffled(item, token_roles, np.random.default_rng([seed, tokens])))
    return moved


def _shuffled(item: Item, token_roles: Collection[str], rng: np.random.Generator) -> Item:
    positions = [tokens[0] for tokens in item.nodes["token"]]
    groups = _groups(item, positions)
    order = [position for group in rng.permutation(len(groups)) for position in groups[group]]
    moved = dict(zip(order, positions, strict=True))
    ids = list(item.ids)
    for old, new in moved.items():
        ids[new] = item.ids[old]
    return replace(
        item,
        ids=tuple(ids),
        nodes={
            level: nodes
            if level == "token"
            else [sorted(moved.get(token, token) for token in tokens) for tokens in nodes]
            for level, nodes in item.nodes.items()
        },
        pairs={
            name: [(moved.get(q, q), moved.get(k, k)) for q, k in pairs]
            if name in token_roles
            else pairs
            for name, pairs in item.pairs.items()
        },
    )


def _groups(item: Item, positions: Sequence[int]) -> list[list[int]]:
    """Tokens that move together: those between the ends of a word or a mention."""
    reach = {position: position for position in positions}  # where the group of a token ends
    for node in (node for level in ("word", "mention") for node in item.nodes.get(level, ())):
        if tokens := [token for token in node if token in reach]:  # special ones keep their places
            reach[tokens[0]] = max(reach[tokens[0]], tokens[-1])
    groups: list[list[int]] = []
    end = -1
    for position in positions:
        if position > end:
            groups.append([])
        groups[-1].append(position)
        end = max(end, reach[position])
    return groups


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
    before = texts[0].ids[: texts[0].special.index(False)]
    columns = ((text.ids, text.special, text.punctuation) for text in texts)
    tokens = (token for of_text in columns for token in zip(*of_text, strict=True))
    words = sorted({token for token, special, mark in tokens if not special and not mark})
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
        others = rng.choice(words, length, replace=len(words) < length).tolist()
        pairs = _pairs(len(before), prefix, period, length)
        nodes = [(position,) for position in range(len(before), len(before) + length)]
        repeated.append(Item((*before, *ids), {"token": nodes}, pairs))
        controls.append(Item((*before, *others), {"token": nodes}, pairs))
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
