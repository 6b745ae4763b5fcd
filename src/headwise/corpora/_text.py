"""One text and what is known about it: its words, a tree, mentions, translations."""

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.errors import ArgumentError

Span = tuple[int, int]  # of characters: from the first to the one after the last


@dataclass(frozen=True)
class Arc:
    """A dependency: the word `dependent` hangs on the word `head` as its `relation`."""

    dependent: int
    head: int
    relation: str


@dataclass(frozen=True)
class Mention:
    """The characters from `start` to `end` speak of the entity of this number."""

    start: int
    end: int
    entity: int


@dataclass(frozen=True)
class AnnotatedText:
    """A text with what is known about it; all that is not known is empty.

    Words are characters of the text, so that any tokenizer can be held against them. Words of a
    contraction that share characters (`du` is `de` and `le`) share the span.

    Attributes:
        text: The text itself.
        words: The span of each word, in order.
        tags: The part of speech of each word (Universal Dependencies; `_` where unknown).
        arcs: The dependencies between words; the root of a tree hangs on nothing.
        mentions: What speaks of which entity. Mentions of one number corefer.
        links: Pairs of words that translate each other: (word, its source).
    Raises:
        ArgumentError: something lies outside the text, words are out of order, a word has two
            heads, or arcs run in a circle.

    Example:
        >>> text = AnnotatedText("Ann sang", ((0, 3), (4, 8)), arcs=(Arc(0, 1, "nsubj"),))
        >>> text.word(0)
        'Ann'
    """

    text: str
    words: tuple[Span, ...] = ()
    tags: tuple[str, ...] = ()
    arcs: tuple[Arc, ...] = ()
    mentions: tuple[Mention, ...] = ()
    links: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _check_spans("word", self.words, len(self.text))
        if list(self.words) != sorted(self.words):
            raise ArgumentError(f"{_WHO}: words are not in order. Sort them by their spans.")
        if self.tags and len(self.tags) != len(self.words):
            raise ArgumentError(
                f"{_WHO}: {len(self.tags)} tags for {len(self.words)} words. Give one for each."
            )
        ends = [(arc.dependent, arc.head) for arc in self.arcs]
        _check_words("arc", ends, len(self.words))
        _check_words("link", self.links, len(self.words))
        _check_tree(self.arcs, len(self.words))
        spans = [(mention.start, mention.end) for mention in self.mentions]
        _check_spans("mention", spans, len(self.text))

    def word(self, at: int) -> str:
        """The characters of a word."""
        start, end = self.words[at]
        return self.text[start:end]


_WHO = "AnnotatedText"


def _check_spans(what: str, spans: Sequence[Span], length: int) -> None:
    for start, end in spans:
        if not 0 <= start < end <= length:
            raise ArgumentError(
                f"{_WHO}: {what} [{start}, {end}) in a text of {length} characters. "
                f"Give spans within the text, of at least one character."
            )


def _check_words(what: str, pairs: Sequence[tuple[int, int]], n_words: int) -> None:
    for pair in pairs:
        if not all(0 <= at < n_words for at in pair):
            raise ArgumentError(
                f"{_WHO}: {what} {pair} between {n_words} words. "
                f"Name words that there are, counted from 0."
            )


def _check_tree(arcs: Sequence[Arc], n_words: int) -> None:
    """Refuse what no tree can have: a word with two heads, a circle."""
    heads: dict[int, int] = {}
    for arc in arcs:
        if arc.dependent in heads:
            raise ArgumentError(f"{_WHO}: word {arc.dependent} has two heads. Keep one.")
        heads[arc.dependent] = arc.head
    settled: set[int] = set()
    for start in heads:
        way: list[int] = []
        at: int | None = start
        while at is not None and at not in settled:
            settled.add(at)
            way.append(at)
            at = heads.get(at)
        if at in way:
            circle = way[way.index(at) :]
            raise ArgumentError(
                f"{_WHO}: the words {circle} hang on each other in a circle. Mend the tree."
            )
