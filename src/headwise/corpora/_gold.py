"""What is known of lines of the grammar by construction: annotations, and minimal pairs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from headwise.corpora._grammar import (
    ADVERBS,
    PRONOUNS,
    TENSES,
    Line,
    english_form,
    relations,
    spanish_form,
)
from headwise.corpora._text import AnnotatedText, Arc, Mention, Span

_TAG = {",": "PUNCT", "=": "PUNCT"}
_TAG |= dict.fromkeys([*PRONOUNS, *PRONOUNS.values()], "PRON")
_TAG |= dict.fromkeys([*ADVERBS, *ADVERBS.values()], "ADV")
_ARC = {"PRON": "nsubj", "ADV": "advmod"}


def annotate(line: Line) -> AnnotatedText:
    """Annotate a line of the grammar; a repeated sequence gets its words alone.

    Every word depends on the verb of its clause, a comma on the verb after it, the verb of a
    later clause on the first verb of its language (`conj`), and the first Spanish verb on the
    first English one (`parataxis`). A pronoun and its translation are mentions
    of one entity. Each Spanish word is linked with the English word that it translates.
    """
    text = str(line)
    spans: list[Span] = []
    for word in line.words:
        start = spans[-1][1] + 1 if spans else 0
        spans.append((start, start + len(word)))
    if line.verb is None:
        return AnnotatedText(text, tuple(spans))
    tags = tuple(_TAG.get(word, "VERB") for word in line.words)
    half = line.words.index("=")
    pairs = [(half + 1 + source, source) for source in range(half)]
    pronouns = [(word, source) for word, source in pairs if tags[source] == "PRON"]
    return AnnotatedText(
        text,
        tuple(spans),
        tags=tags,
        arcs=tuple(_arcs(tags, half)),
        mentions=tuple(
            Mention(*spans[word], entity)
            for entity, pronoun_pair in enumerate(pronouns)
            for word in pronoun_pair
        ),
        links=tuple((word, source) for word, source in pairs if tags[source] != "PUNCT"),
    )


def _arcs(tags: tuple[str, ...], half: int) -> Iterator[Arc]:
    verbs = [word for word, tag in enumerate(tags) if tag == "VERB"]
    root, spanish = verbs[0], verbs[len(verbs) // 2]
    for word, tag in enumerate(tags):
        if tag == "VERB":
            if word == spanish:
                yield Arc(word, root, "parataxis")
            elif word != root:
                yield Arc(word, root if word < half else spanish, "conj")
        else:
            verb = next(verb for verb in verbs if verb > word)
            yield Arc(word, verb, _ARC.get(tag, "punct"))


@dataclass(frozen=True)
class Choice:
    """The beginning of a text with a right and a wrong next word.

    Example:
        >>> Choice("The keys to the cabinet", right="are", wrong="is").right
        'are'
    """

    before: str
    right: str
    wrong: str


def choices(lines: Iterable[Line], apart: bool, seed: int = 0) -> list[Choice]:
    """Draw one verb from each line of the grammar, with a form that disagrees with its subject.

    Only verbs that occur earlier in the line qualify, in English or in Spanish, so that just the
    form is unknown. The wrong form is the one of `they`, or of `he` where both are the same.

    Args:
        apart: Whether an adverb stands between subject and verb, or nothing does.
        seed: The seed for the choice among several such verbs of a line.
    Returns:
        At most one choice per line, none for a repeated sequence.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for line in lines:
        distinct = [choice for choice in _of_line(line, apart) if choice.wrong != choice.right]
        if distinct:
            drawn.append(distinct[rng.integers(len(distinct))])
    return drawn


_ENGLISH = {spanish: english for english, spanish in PRONOUNS.items()}


def _of_line(line: Line, apart: bool) -> list[Choice]:
    """Every verb of a line but the first, with another form of it, which may be equal."""
    if line.verb is None:
        return []
    half = line.words.index("=")
    candidates = []
    for verb, subject in relations(line.words)["subject"]:
        if subject and (verb - subject > 1) == apart:
            form = english_form if verb < half else spanish_form
            right, pronoun = line.words[verb], line.words[subject]
            person = _ENGLISH.get(pronoun, pronoun)
            tense = next(tense for tense in TENSES if form(line.verb, tense, person) == right)
            they, he = (form(line.verb, tense, other) for other in ("they", "he"))
            before = " ".join(line.words[:verb])
            candidates.append(Choice(before, right, he if they == right else they))
    return candidates
