"""Texts with two names of which one repeats, so that the other one has to follow."""

from collections.abc import Sequence
from string import Formatter

import numpy as np

from headwise._display import counted
from headwise.corpora._text import AnnotatedText, Mention
from headwise.errors import ArgumentError

NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate"),
    *("Leo", "Mary", "Nick", "Olivia", "Paul", "Rose", "Sam", "Tom", "Vera"),
)
# Both names come first, in either order; then one again, and the other one last.
PATTERNS = (
    "When {one} and {two} went to the {place}, {again} gave a {thing} to {other}.",
    "Then {one} and {two} sat in the {place}, and {again} showed the {thing} to {other}.",
    "{one} and {two} had fun at the {place}. {again} wanted to give the {thing} to {other}.",
    "After {one} met {two} at the {place}, {again} sold an old {thing} to {other}.",
    "One day {one} and {two} came home from the {place} and {again} handed a {thing} to {other}.",
)
_SLOTS = {"one", "two", "again", "other"}
_PLACES = ("park", "store", "school", "garden", "farm", "station", "river", "market")
_THINGS = ("ball", "book", "letter", "cake", "flower", "hat", "toy", "box")


def name_texts(
    n: int, *, names: Sequence[str] = NAMES, patterns: Sequence[str] = PATTERNS, seed: int = 0
) -> list[AnnotatedText]:
    """Draw texts with two names of which one repeats, and the other one follows at the end.

    *When Mary and John went to the store, John gave a drink to Mary.* Names, their order and the
    pattern are drawn at random, so that neither a place nor a name tells which one follows. The
    mentions of a text are its names, each an entity of its own.

    Args:
        n: The number of texts; some may be alike.
        names: The names to draw from.
        patterns: Texts with the slots `{one}`, `{two}`, `{again}` and `{other}`, and perhaps
            `{place}` and `{thing}`. `{one}` and `{two}` are the names in either order, `{again}`
            is the one that repeats.
        seed: The seed of all draws.
    Raises:
        ArgumentError: there are fewer than two names, or a pattern has other slots.
    Source:
        Wang et al. 2023, "Interpretability in the Wild", section 2.

    Example:
        >>> text = name_texts(1)[0]
        >>> len(text.mentions)
        4
    """
    if len(set(names)) < 2:
        n_names = counted(len(set(names)), "different name")
        raise ArgumentError(f"name_texts: {n_names}. Give two or more.")
    for pattern in patterns:
        slots = [slot for _, slot, _, _ in Formatter().parse(pattern) if slot is not None]
        if not _SLOTS <= set(slots) <= _SLOTS | {"place", "thing"}:
            raise ArgumentError(
                f"name_texts: the slots of {pattern!r} are {', '.join(slots) or 'none'}. Give "
                f"{{one}}, {{two}}, {{again}} and {{other}}."
            )
    rng = np.random.default_rng(seed)
    return [_drawn(rng, list(dict.fromkeys(names)), patterns) for _ in range(n)]


def _drawn(
    rng: np.random.Generator, names: Sequence[str], patterns: Sequence[str]
) -> AnnotatedText:
    first, second = rng.permutation(len(names))[:2].tolist()
    again, other = (first, second) if rng.random() < 0.5 else (second, first)
    entity = {"one": first, "two": second, "again": again, "other": other}
    words = {slot: names[number] for slot, number in entity.items()}
    words |= {"place": str(rng.choice(_PLACES)), "thing": str(rng.choice(_THINGS))}
    text, mentions = "", []
    for before, slot, _, _ in Formatter().parse(str(rng.choice(list(patterns)))):
        text += before
        if slot in entity:
            mentions.append(Mention(len(text), len(text) + len(words[slot]), entity[slot]))
        text += words.get(slot or "", "")
    return AnnotatedText(text, mentions=tuple(mentions))
