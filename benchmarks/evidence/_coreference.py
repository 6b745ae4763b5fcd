"""Antecedents in paragraphs of GAP: mentions, who they refer to, and rules that choose one.

GAP annotates a pronoun and two names of a paragraph. The other names are found here by their
capital letters; those whose words are words of the pronoun's name, or the other way round, count
as the same person, so "Cheryl" and "Cheryl Cassidy" corefer.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from headwise.corpora import AnnotatedText, Span

WORD = re.compile(r"\w+(?:[-.'’&](?!s\b)\w+)*|['’]s\b|[^\w\s]")
FEMALE, MALE = "female", "male"
PRONOUNS = {"she": FEMALE, "her": FEMALE, "hers": FEMALE, "he": MALE, "him": MALE, "his": MALE}
TITLES = {"mrs": FEMALE, "miss": FEMALE, "ms": FEMALE, "lady": FEMALE, "queen": FEMALE,
          "princess": FEMALE, "mr": MALE, "sir": MALE, "lord": MALE, "king": MALE, "prince": MALE,
          "father": MALE, "mother": FEMALE, "sister": FEMALE, "brother": MALE}  # fmt: skip
# Words that have a capital letter only because a sentence begins, and that begin no name.
NO_NAMES = {"a", "after", "all", "also", "although", "an", "and", "another", "as", "at",
            "because", "before", "both", "but", "by", "during", "each", "every", "following",
            "for", "from", "he", "her", "here", "hers", "him", "his", "how", "however", "i", "if",
            "in", "it", "its", "later", "many", "most", "my", "no", "not", "of", "on", "once",
            "one", "other", "our", "she", "since", "so", "some", "such", "that", "the", "their",
            "them", "then", "there", "these", "they", "this", "those", "though", "through", "to",
            "two", "under", "until", "upon", "we", "what", "when", "where", "which", "while",
            "who", "with", "you"}  # fmt: skip


@dataclass(frozen=True)
class Name:
    """A mention as words of a paragraph.

    Attributes:
        words: The first word, and the one after the last.
        forms: The words themselves, in lower case.
        pronoun: Whether it is the pronoun.
        entity: 0 for the person that the pronoun refers to.
        annotated: Whether GAP annotates it.
    """

    words: Span
    forms: tuple[str, ...]
    pronoun: bool
    entity: int
    annotated: bool

    @cached_property
    def head(self) -> int:
        """The head word: the last, as in `Cheryl Cassidy`."""
        return self.words[1] - 1


@dataclass(frozen=True)
class Query:
    """A mention with an antecedent, and the mentions to choose among."""

    mention: Name
    candidates: tuple[Name, ...]

    def is_right(self, chosen: Name) -> bool:
        """Whether this is an antecedent: an earlier mention of the same entity."""
        return chosen.entity == 0 and chosen.head < self.mention.head

    @cached_property
    def right(self) -> list[bool]:
        return [self.is_right(candidate) for candidate in self.candidates]


@dataclass(frozen=True)
class Paragraph:
    """A text of GAP with its words and all its mentions, in order."""

    text: str
    spans: tuple[Span, ...]
    names: tuple[Name, ...]

    def queries(self, annotated: bool) -> list[Query]:
        """The annotated mentions of the pronoun's person that have an antecedent.

        Args:
            annotated: Whether only the mentions that GAP annotates are candidates.
        """
        mentions = [name for name in self.names if name.annotated or not annotated]
        queries = [
            Query(mention, tuple(other for other in mentions if other is not mention))
            for mention in mentions
            if mention.annotated and mention.entity == 0
        ]
        return [query for query in queries if any(query.right)]

    def occurrences(self, name: Name) -> int:
        """How often the form of a name occurs in the text."""
        start, end = self.spans[name.words[0]][0], self.spans[name.head][1]
        return self.text.count(self.text[start:end])

    def named(self, name: Name) -> int:
        """How many names of the text may be the same person, by their words; 0 for a pronoun."""
        others = (other.forms for other in self.names if not other.pronoun)
        return 0 if name.pronoun else sum(is_part(name.forms, other) for other in others)


def paragraph(annotated: AnnotatedText) -> Paragraph:
    """The mentions of a text of GAP, which are those annotated and other names."""
    spans = tuple(match.span() for match in WORD.finditer(annotated.text))
    words = [annotated.text[start:end] for start, end in spans]
    names = []
    for mention in annotated.mentions:
        inside = [
            n for n, (start, end) in enumerate(spans) if start < mention.end and mention.start < end
        ]
        covered = inside[0], inside[-1] + 1 - (words[inside[-1]].lower() in ("'s", "’s"))
        own = annotated.text[mention.start : mention.end]
        forms = tuple(word.lower() for word in WORD.findall(own))
        names.append(Name(covered, forms, mention.pronoun, mention.entity, annotated=True))
    taken = {n for name in names for n in range(*name.words)}
    persons = [name.forms for name in names if name.entity == 0 and not name.pronoun]
    for covered in capitalised(words):
        if taken.isdisjoint(range(*covered)):
            forms = tuple(word.lower() for word in words[slice(*covered)])
            same = any(is_part(forms, person) for person in persons)
            names.append(Name(covered, forms, False, 0 if same else -1, annotated=False))
    return Paragraph(annotated.text, spans, tuple(sorted(names, key=lambda name: name.words)))


def is_part(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether all words of one name are words of the other."""
    return set(one) <= set(other) or set(other) <= set(one)


def capitalised(words: Sequence[str]) -> Iterator[Span]:
    """Runs of words with capital letters, without words that only begin a sentence."""
    inner = {
        word for n, word in enumerate(words) if word[0].isupper() and not _begins(words, n)
    }  # fmt: skip
    start = None
    for n in range(len(words) + 1):
        word = words[n] if n < len(words) else "."
        named = word[0].isupper() and word.lower() not in NO_NAMES
        if start is not None and not named:
            alone = n - start == 1 and _begins(words, start) and words[start] not in inner
            if not alone:
                yield start, n
            start = None
        elif start is None and named:
            start = n


def _begins(words: Sequence[str], n: int) -> bool:
    return n == 0 or words[n - 1] in (".", "!", "?", '"', "“", ":", ";", "``")


def genders(paragraphs: Iterable[Paragraph]) -> dict[str, str]:
    """The gender of first names, from the pronouns that refer to them in these paragraphs."""
    counts: dict[str, Counter[str]] = {}
    for one in paragraphs:
        pronouns = [name.forms[0] for name in one.names if name.pronoun]
        for name in one.names:
            if name.annotated and name.entity == 0 and not name.pronoun:
                counts.setdefault(name.forms[0], Counter()).update(
                    PRONOUNS[form] for form in pronouns
                )
    return {form: count.most_common(1)[0][0] for form, count in counts.items()}


def gender(name: Name, known: Mapping[str, str]) -> str | None:
    """The gender of a mention; None if it is not known."""
    if name.pronoun:
        return PRONOUNS[name.forms[0]]
    return TITLES.get(name.forms[0]) or known.get(name.forms[0])


def choices(where: Paragraph, query: Query, known: Mapping[str, str]) -> dict[str, Name]:
    """What each rule chooses: three of Clark et al., and others."""
    mention, candidates = query.mention, query.candidates
    order = sorted(candidates, key=lambda name: (abs(name.head - mention.head), name.head))
    earlier = [name for name in order if name.head < mention.head]
    persons = gender(mention, known)
    sieves = (
        lambda name: name.forms == mention.forms,
        lambda name: name.forms[-1] == mention.forms[-1],
        lambda name: persons is not None and gender(name, known) == persons,
        lambda name: True,
    )
    return {
        "nearest": order[0],
        "same head word": next((x for x in order if sieves[1](x)), order[0]),
        "sieve": next(x for sieve in sieves for x in order if sieve(x)),
        "nearest before": earlier[0],
        "first": min(candidates, key=lambda name: name.head),
        "most repeated": max(order, key=where.occurrences),
        "most named before": max(earlier, key=where.named),
    }
