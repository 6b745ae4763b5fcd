"""Items with the pairs of every role: texts, and random sequences that repeat.

Each has a contrast: a text with its words in another order, or a sequence that does not repeat.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from reprlib import repr as shortened
from typing import Any
from zlib import crc32

import numpy as np

from headwise.errors import ArgumentError
from headwise.roles.relations._relations import Level, Role, content
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
PREFIX_MATCHING = Role(
    "prefix matching",
    "a token of a random sequence → what followed its earlier copies",
    lambda text: (),
    score="mass",
    kind="probe",
    ahead=True,
)
PROBED = (SAME, PREFIX_MATCHING)

_Pairs = Mapping[str, Sequence[tuple[Any, Any]]]  # (query, key), by the name of the role


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
    """

    ids: tuple[int, ...]
    nodes: Mapping[Level, Sequence[Sequence[int]]]
    pairs: Mapping[str, Sequence[tuple[int, int]]]
    tags: Sequence[str] = ()
    candidates: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    mentions: Sequence[str] = ()
    text: str = ""


def as_item(text: TokenText, roles: Sequence[Role]) -> Item:
    """Turn a text into an item, with its pairs of every role.

    Raises:
        ArgumentError: a role returns something other than pairs of whole numbers, a pair outside
            the text, or one that is not among its candidates.
    """
    whole = text.text
    spans = [(mention.start, mention.end) for mention in whole.mentions]
    nodes: dict[Level, list[Sequence[int]]] = {
        "token": [(position,) for position in content(text)],
        "word": list(text.words),
        "mention": [text.tokens_in(span) for span in spans],
    }
    sizes = {level: len(of_grid) for level, of_grid in nodes.items()} | {"token": len(text.ids)}
    named = {role.name: _named_pairs(text, role, role.pairs, sizes) for role in roles}
    named_candidates = {
        role.name: _named_pairs(text, role, role.candidates, sizes)
        for role in roles
        if role.candidates is not None
    }
    # A phrase that a role names becomes a node of the level of mentions, after the annotated ones.
    of_roles = (*named.values(), *named_candidates.values())
    ends = (end for pairs in of_roles for pair in pairs for end in pair)
    phrases = list(dict.fromkeys(end for end in ends if isinstance(end, tuple)))
    number = {phrase: node for node, phrase in enumerate(phrases, len(spans))}
    nodes["mention"] += phrases
    mentions = [whole.text[start:end] for start, end in spans]
    mentions += [_characters(text, phrase) for phrase in phrases]
    pairs, candidates = _numbered(named, number), _numbered(named_candidates, number)
    _check_candidates(text, pairs, candidates, nodes["mention"])
    return Item(text.ids, nodes, pairs, whole.tags, candidates, mentions, whole.text)


def _numbered(named: _Pairs, number: Mapping[Any, int]) -> _Pairs:
    """Pairs with the number of its node in place of each phrase."""
    return {
        name: sorted((number.get(query, query), number.get(key, key)) for query, key in pairs)
        for name, pairs in named.items()
    }


def _named_pairs(
    text: TokenText, role: Role, function: Callable[[TokenText], Any], sizes: Mapping[Level, int]
) -> list[tuple[Any, Any]]:
    """The distinct pairs of a role in order; an end is the number of a node, or a phrase."""
    result = function(text)
    try:
        pairs = sorted({(_end(query, role), _end(key, role)) for query, key in result})
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"find_roles: {role.name!r} returns {shortened(result)} for the text "
            f"{shortened(text.text.text)}. Return pairs of positions: (query, key)."
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


def _characters(text: TokenText, phrase: Sequence[int]) -> str:
    start, end = text.spans[phrase[0]][0], text.spans[phrase[-1]][1]
    return text.text.text[start:end].strip()


def _check_candidates(
    text: TokenText, pairs: _Pairs, candidates: _Pairs, nodes: Sequence[Sequence[int]]
) -> None:
    for name, among in candidates.items():
        missing = sorted({*pairs[name]} - {*among})
        if missing:
            query, key = (nodes[node] for node in missing[0])
            raise ArgumentError(
                f"find_roles: {name!r} gives the tokens {(tuple(query), tuple(key))} as a right "
                f"choice, and not as a candidate, for the text {shortened(text.text.text)}. Let "
                f"candidates return every pair to choose from, the right ones included."
            )


def shuffled(items: Sequence[Item], roles: Sequence[Role], seed: int = 0) -> list[Item]:
    """The same texts with their words in another order; pairs and nodes move with their words.

    The tokens of a word stay together, as do those of a mention; special tokens keep their places.
    The order of a text depends on its tokens and the seed, not on the other texts.
    """
    token_roles = {role.name for role in roles if role.level == "token"}
    return [_shuffled(item, token_roles, _generator_of(item, seed)) for item in items]


def _generator_of(item: Item, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(np.array(item.ids, dtype="<i8").tobytes())])


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
    return draw_probe(before_text(texts[0]), sorted(words_in(texts)), limit, sequences, seed)


def words_in(texts: Sequence[TokenText]) -> set[int]:
    """The tokens of texts that are neither special nor punctuation."""
    return {
        token
        for text in texts
        for token, special, mark in zip(text.ids, text.special, text.punctuation, strict=True)
        if not special and not mark
    }


def before_text(text: TokenText) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts before a text."""
    return text.ids[: text.special.index(False)]


def draw_probe(
    before: Sequence[int], words: Sequence[int], limit: int, sequences: int, seed: int
) -> tuple[list[Item], list[Item]]:
    """Draw the sequences of `probe` from these tokens, each after the tokens `before`."""
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
        (query, copy)
        for query in range(start, end)
        for copy in range(start + (query - start) % period, end, period)
        if copy != query
    ]
    after = [(query, copy + 1) for query, copy in same if copy < query]
    return {SAME.name: same, PREFIX_MATCHING.name: after}


def _item(
    before: Sequence[int], ids: Sequence[int], pairs: dict[str, list[tuple[int, int]]]
) -> Item:
    tokens = (*before, *ids)
    nodes = [(position,) for position in range(len(before), len(tokens))]
    return Item(tokens, {"token": nodes}, pairs)
