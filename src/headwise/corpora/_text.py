"""Texts with annotations (words, tags, a tree, mentions, translations), and examples of a task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwise._display import counted
from headwise.errors import ArgumentError

Span = tuple[int, int]  # half-open range of characters


@dataclass(frozen=True)
class Arc:
    """A dependency from the word `dependent` to its syntactic head, the word `head`."""

    dependent: int
    head: int
    relation: str


@dataclass(frozen=True)
class Mention:
    """The characters from `start` to `end` refer to the entity with this number.

    `pronoun` marks a mention that is annotated as a pronoun. A mention that is a single word
    tagged `PRON` is a pronoun in any case.
    """

    start: int
    end: int
    entity: int
    pronoun: bool = False


@dataclass(frozen=True)
class Pair:
    """A relation of your own, by name: attention from the word `query` to the word `key`."""

    query: int
    key: int
    relation: str


@dataclass(frozen=True)
class AnnotatedText:
    """A text with its annotations; those that are unknown are empty.

    Words are spans of characters, so that they fit any tokenizer. The words of a contraction
    (`du` is `de` and `le`) share one span. For relations of your own they may be any spans.

    Attributes:
        text: The text itself.
        words: The span of each word, in order.
        tags: The part of speech of each word (Universal Dependencies; `_` where unknown).
        arcs: The dependencies between words; the root of a tree has none.
        mentions: The mentions of entities. Mentions of one entity corefer.
        links: Pairs of words that translate each other: (word, its source).
        pairs: Relations of your own between words.
    Raises:
        ArgumentError: a span or word index lies outside the text, words are out of order, a word
            has two heads, or arcs form a cycle.

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
    pairs: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        _check_spans("word", self.words, len(self.text))
        if list(self.words) != sorted(self.words):
            raise ArgumentError(f"{_WHO}: words are not in order. Sort them by their spans.")
        if self.tags and len(self.tags) != len(self.words):
            raise ArgumentError(
                f"{_WHO}: {counted(len(self.tags), 'tag')} for {counted(len(self.words), 'word')}. "
                f"Give one for each."
            )
        ends = [(arc.dependent, arc.head) for arc in self.arcs]
        _check_words("arc", ends, len(self.words))
        _check_words("link", self.links, len(self.words))
        _check_words("pair", [(pair.query, pair.key) for pair in self.pairs], len(self.words))
        _check_tree(self.arcs, len(self.words))
        spans = [(mention.start, mention.end) for mention in self.mentions]
        _check_spans("mention", spans, len(self.text))

    def word(self, index: int) -> str:
        """The characters of a word."""
        start, end = self.words[index]
        return self.text[start:end]

    def is_pronoun(self, mention: Mention) -> bool:
        """Whether a mention is a pronoun, by its annotation or by the tag of its only word."""
        words = zip(self.words, self.tags, strict=False)
        return mention.pronoun or ((mention.start, mention.end), "PRON") in words


Stretches = Span | Sequence[Span]


@dataclass(frozen=True)
class Example:
    """A text with a query, the stretches that answer it, and stretches that do not.

    A question with its passage among distractors; an instruction and an injected one; an answer
    and its source. Stretches are `(start, end)`, without the position `end`: of tokens if the text
    is given as token ids, of characters if it is a string (as in `Watch.spans`).

    Attributes:
        text: The text, or its token ids.
        query: The stretch, or stretches, whose tokens are the queries.
        right: The stretches that a head should attend to.
        wrong: The other candidates.
        answer: What follows the text, to measure what ablating heads does to it; a string, or
            token ids. Empty if unknown.
        source: The file and line that it was read from, for errors.
        inputs: What else the model reads of it, each as a tensor of one row: `pixel_values`.
    """

    text: str | Sequence[int]
    query: Stretches
    right: Stretches
    wrong: Stretches
    answer: str | Sequence[int] = ()
    source: str = field(default="", repr=False, compare=False)
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


_WHO = "AnnotatedText"


def _check_spans(what: str, spans: Sequence[Span], length: int) -> None:
    for start, end in spans:
        if not 0 <= start < end <= length:
            raise ArgumentError(
                f"{_WHO}: {what} [{start}, {end}) in a text of {counted(length, 'character')}. "
                f"Give spans within the text, of at least one character."
            )


def _check_words(what: str, pairs: Sequence[tuple[int, int]], n_words: int) -> None:
    for pair in pairs:
        if not all(0 <= word < n_words for word in pair):
            raise ArgumentError(
                f"{_WHO}: {what} {pair} between {n_words} words. "
                f"Name existing words, counted from 0."
            )


def _check_tree(arcs: Sequence[Arc], n_words: int) -> None:
    """Refuse a word with two heads and a cycle, which no tree has."""
    heads: dict[int, int] = {}
    for arc in arcs:
        if arc.dependent in heads:
            raise ArgumentError(f"{_WHO}: word {arc.dependent} has two heads. Keep one.")
        heads[arc.dependent] = arc.head
    visited: set[int] = set()
    for start in heads:
        path: list[int] = []
        word: int | None = start
        while word is not None and word not in visited:
            visited.add(word)
            path.append(word)
            word = heads.get(word)
        if word in path:
            cycle = path[path.index(word) :]
            raise ArgumentError(
                f"{_WHO}: the arcs of the words {cycle} form a cycle. Correct the tree."
            )
