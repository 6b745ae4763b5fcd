"""Statistics of a whole corpus that every shard needs to find roles."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headwise.corpora import AnnotatedText
from headwise.corpora.streams import windows
from headwise.files import build_from
from headwise.roles._find import check_tokens, with_relations
from headwise.roles.relations import (
    Relations,
    Role,
    Tokenized,
    before_text,
    dependencies_in,
    dependency_roles,
    draw_probe,
    roles_of_frequency,
    tokenize,
    words_in,
)
from headwise.roles.testing import SEQUENCES, Trial, digest_of_text, probe_trial

# Reads the texts of a shard, in order, without those of white space alone.
ReadShard = Callable[[int], Iterable[AnnotatedText]]


@dataclass(frozen=True)
class Survey:
    """Statistics of a whole corpus: its duplicates, token counts, dependencies and tags.

    Attributes:
        limit: The most tokens that the model reads at once.
        texts: The number of texts, repeated ones included.
        repeated: The shard and the number of each text that is left out, because it occurs before,
            or elsewhere with annotations.
        tokens: The tokens of all texts, in the order in which they occur first.
        counts: How often each of them occurs.
        words: Those that are neither special nor punctuation.
        before: The special tokens before a text.
        dependencies: The names of dependencies in trees.
        tags: The parts of speech.
        cut_at_sentences: Texts longer than the limit, cut between sentences.
        cut_within: Texts with a sentence longer than the limit, cut between words.
        unknown: The share of unknown tokens.
    """

    limit: int
    texts: int
    repeated: list[list[int]]
    tokens: list[int]
    counts: list[int]
    words: list[int]
    before: list[int]
    dependencies: list[str]
    tags: list[str]
    cut_at_sentences: int
    cut_within: int
    unknown: float

    @classmethod
    def of(cls, tokenizer: Any, read: ReadShard, shards: int, limit: int) -> "Survey":
        """Read a corpus twice: to find texts that occur more than once, and to count tokens.

        Memory grows with the number of distinct texts, by a few hundred bytes each.

        Raises:
            InputError: no text has a token, or most tokens are unknown to the tokenizer.
        """
        n_texts, repeated = _repeated(read, shards)
        tally = _Tally()
        for shard in range(shards):
            for window in windows(kept(read(shard), _numbers_in(repeated, shard))):
                tally.add(window, tokenize(tokenizer, window, limit))
        survey = cls(limit, n_texts, [list(place) for place in repeated], **tally.totals())
        check_tokens(n_texts, bool(survey.tokens), survey.unknown)
        return survey

    def as_json(self) -> dict[str, Any]:
        """The content of a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Survey":
        """The survey in a file.

        Raises:
            InputError: something is missing or of the wrong form.
        """
        return build_from(
            lambda: cls(**content)._checked(),
            "corpus: survey.json, the statistics of the whole corpus, is damaged",
            "Delete it, and run the job again.",
        )

    def _checked(self) -> "Survey":
        """This survey.

        Raises:
            ValueError: a value is not of the form that is saved.
        """
        numbers = [self.tokens, self.counts, self.words, self.before, *self.repeated]
        totals = [self.limit, self.texts, self.cut_at_sentences, self.cut_within]
        is_whole = all(_are_whole(values) for values in (totals, *numbers))
        if not (is_whole and all(_are_names(names) for names in (self.dependencies, self.tags))):
            raise ValueError("a list holds values other than whole numbers or names")
        if any(len(place) != 2 for place in self.repeated):
            raise ValueError("the place of a repeated text is not a shard and a number")
        if len(self.tokens) != len(self.counts) or not 0 <= self.unknown <= 1:
            raise ValueError("tokens and counts differ in number, or unknown is not a share")
        return self

    def left_out(self, shard: int) -> set[int]:
        """The numbers of the texts of a shard that are left out."""
        return _numbers_in(self.repeated, shard)

    def roles(self, relations: Relations) -> list[Role]:
        """The roles to test."""
        frequency = Counter(dict(zip(self.tokens, self.counts, strict=True)))
        known = [*roles_of_frequency(frequency), *dependency_roles(self.dependencies)]
        return with_relations(known, relations)

    def probe_trial(self, seed: int) -> Trial | None:
        """Random sequences that repeat, with controls; None for too few different tokens."""
        drawn = draw_probe(self.before, self.words, self.limit, SEQUENCES, seed)
        return probe_trial(*drawn, seed)

    def tokenized(self) -> Tokenized:
        """How many texts were cut and how many tokens are unknown, without the tokens."""
        return Tokenized((), self.cut_at_sentences, self.cut_within, self.unknown)


def _are_whole(values: Any) -> bool:
    is_list = isinstance(values, list)
    return is_list and all(type(n) is int and 0 <= n < 2**63 for n in values)


def _are_names(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(name, str) for name in values)


def kept(texts: Iterable[AnnotatedText], left_out: set[int]) -> Iterator[AnnotatedText]:
    """The texts of a shard without those that are left out, by their numbers."""
    return (text for number, text in enumerate(texts) if number not in left_out)


def _numbers_in(places: Iterable[Sequence[int]], shard: int) -> set[int]:
    """The numbers of the texts at places in a shard."""
    return {number for of_shard, number in places if of_shard == shard}


def _repeated(read: ReadShard, shards: int) -> tuple[int, list[tuple[int, int]]]:
    """The number of texts, and the places of those that add nothing to another."""
    seen: set[bytes] = set()
    plain: dict[bytes, tuple[int, int]] = {}
    annotated: set[bytes] = set()
    repeated: list[tuple[int, int]] = []
    n_texts = 0
    for shard in range(shards):
        for number, text in enumerate(read(shard)):
            n_texts += 1
            digest = digest_of_text(repr(text))
            if digest in seen:
                repeated.append((shard, number))
                continue
            seen.add(digest)
            if text == AnnotatedText(text.text):
                plain[digest_of_text(text.text)] = (shard, number)
            else:
                annotated.add(digest_of_text(text.text))
    repeated += [plain[digest] for digest in plain.keys() & annotated]
    return n_texts, sorted(repeated)


@dataclass
class _Tally:
    """Sums over windows of texts."""

    frequency: Counter[int] = field(default_factory=Counter)
    words: set[int] = field(default_factory=set)
    before: list[int] | None = None
    dependencies: set[str] = field(default_factory=set)
    tags: set[str] = field(default_factory=set)
    cut: list[int] = field(default_factory=lambda: [0, 0])
    unknown: float = 0.0
    known: int = 0

    def add(self, texts: list[AnnotatedText], tokenized: Tokenized) -> None:
        pieces = tokenized.pieces
        self.frequency.update(token for piece in pieces for token in piece.ids)
        self.words |= words_in(pieces)
        if pieces and self.before is None:
            self.before = list(before_text(pieces[0]))
        self.dependencies |= dependencies_in(piece.text for piece in pieces)
        self.tags |= {tag for text in texts for tag in text.tags} - {"_"}
        self.cut[0] += tokenized.cut_at_sentences
        self.cut[1] += tokenized.cut_within
        tokens = sum(not special for piece in pieces for special in piece.special)
        self.unknown += round(tokenized.unknown * tokens)
        self.known += tokens

    def totals(self) -> dict[str, Any]:
        return {
            "tokens": list(self.frequency),
            "counts": list(self.frequency.values()),
            "words": sorted(self.words),
            "before": self.before or [],
            "dependencies": sorted(self.dependencies),
            "tags": sorted(self.tags),
            "cut_at_sentences": self.cut[0],
            "cut_within": self.cut[1],
            "unknown": self.unknown / max(1, self.known),
        }
