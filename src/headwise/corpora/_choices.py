"""Places where one of two words is right: what agreement is judged on."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headwise.corpora._grammar import Line
from headwise.corpora._relations import relations
from headwise.corpora._verbs import PRONOUNS, TENSES, english_form, spanish_form


@dataclass(frozen=True)
class Choice:
    """A beginning, and two words that could go on from it, of which one is right.

    Example:
        >>> Choice("The keys to the cabinet", right="are", wrong="is").right
        'are'
    """

    before: str
    right: str
    wrong: str


def choices(lines: Iterable[Line], apart: bool, seed: int = 0) -> list[Choice]:
    """A verb form of each line of the grammar, against a form that its subject can't have.

    Only a verb that the line has named before is asked for, so that the form is all there is to
    know; in English or in Spanish. The wrong form is that beside `they`, or beside `he` where
    this is no other.

    Args:
        apart: Whether an adverb stands between subject and verb, or nothing does.
        seed: Decides which of several such verbs of a line is asked for.
    Returns:
        At most one choice of each line, none of a repeated sequence.
    """
    rng = np.random.default_rng(seed)
    found = []
    for line in lines:
        asked = [one for one in _of_line(line, apart) if one.wrong != one.right]
        if asked:
            found.append(asked[rng.integers(len(asked))])
    return found


_ENGLISH = {spanish: english for english, spanish in PRONOUNS.items()}


def _of_line(line: Line, apart: bool) -> list[Choice]:
    """Every verb of a line but the first, with another form of it; perhaps the same."""
    if line.verb is None:
        return []
    half = line.words.index("=")
    found = []
    for verb, subject in relations(line.words)["subject"]:
        if subject and (verb - subject > 1) == apart:
            form = english_form if verb < half else spanish_form
            right, pronoun = line.words[verb], line.words[subject]
            person = _ENGLISH.get(pronoun, pronoun)
            tense = next(one for one in TENSES if form(line.verb, one, person) == right)
            they, he = (form(line.verb, tense, one) for one in ("they", "he"))
            before = " ".join(line.words[:verb])
            found.append(Choice(before, right, he if they == right else they))
    return found
