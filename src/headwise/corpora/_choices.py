"""Minimal pairs for agreement: a beginning with a right and a wrong continuation."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headwise.corpora._grammar import Line
from headwise.corpora._relations import relations
from headwise.corpora._verbs import PRONOUNS, TENSES, english_form, spanish_form


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
