"""A small English–Spanish grammar with known agreement and translation."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from headwise.corpora._relations import SPECIALS
from headwise.corpora._verbs import ADVERBS, PRONOUNS, TENSES, VERBS, english_form, spanish_form
from headwise.errors import ArgumentError

_CLAUSES = (2, 4)  # in a sentence
_PREFIX = (0, 6)  # words before a repeated sequence
_PERIOD = (5, 16)  # words in it
_SAME_FORM = (("he", "she"), ("y'all", "they"))  # pairs of pronouns with one form of the verb


@dataclass(frozen=True)
class Line:
    """A line of text.

    Attributes:
        verb: The English verb of a sentence; None for a repeated sequence.
    """

    words: tuple[str, ...]
    verb: str | None

    def __str__(self) -> str:
        return " ".join(self.words)


class Grammar:
    """Draws lines such as `I work , he never works = yo trabajo , él nunca trabaja`.

    A sentence has two to four clauses with one verb in one tense and different pronouns, in
    English, then in Spanish in the same order. An adverb may stand between subject and verb, so
    that no fixed distance explains agreement. The other lines repeat a sequence of random words
    at a random distance after a random prefix, without a delimiter that would reveal the
    distance.

    For every verb, one of {he, she} and one of {y'all, they} is held out: the verb and that
    pronoun never occur in one clause, in any tense, unless `held_out` requests it. The form of
    the verb still occurs with the other pronoun, so a model that predicts it for the held-out
    pronoun has generalized agreement.

    Args:
        seed: The seed for what is held out, and for nothing else.
        repeat_share: The share of lines that repeat a sequence, from 0 to 1.
        adverb_share: The share of clauses that have an adverb, from 0 to 1.
    Raises:
        ArgumentError: a share is not between 0 and 1.
    Attributes:
        longest: Words of the longest line: four clauses with adverbs, twice, and the `=`.
        vocabulary: Every word that can occur, the special tokens first.
        held_out: The pairs (English verb, English pronoun) that are held out.
    """

    longest: ClassVar[int] = 2 * (4 * _CLAUSES[1] - 1) + 1

    def __init__(self, seed: int = 0, repeat_share: float = 0.5, adverb_share: float = 0.5) -> None:
        for name, share in (("repeat_share", repeat_share), ("adverb_share", adverb_share)):
            if not 0 <= share <= 1:
                raise ArgumentError(f"Grammar: {name} is {share}. Give a share from 0 to 1.")
        self.repeat_share = repeat_share
        self.adverb_share = adverb_share
        rng = np.random.default_rng(seed)
        self.held_out = frozenset(
            (verb, pair[rng.integers(2)]) for verb in VERBS for pair in _SAME_FORM
        )
        self.vocabulary = (*SPECIALS, *_words())

    def line(self, rng: np.random.Generator, held_out: bool = False) -> Line:
        """Draw a line: a repeated sequence or a sentence; with `held_out`, always a sentence."""
        if not held_out and rng.random() < self.repeat_share:
            return self.repeat(rng)
        return self.sentence(rng, held_out)

    def sentence(self, rng: np.random.Generator, held_out: bool = False) -> Line:
        """Draw a sentence; with `held_out`, one of its clauses has a held-out verb and pronoun.

        It is never the first clause, so that the verb occurs earlier in the line.
        """
        verb = _VERBS[rng.integers(len(_VERBS))]
        tense = TENSES[rng.integers(len(TENSES))]
        shuffled = [_PRONOUNS[number] for number in rng.permutation(len(_PRONOUNS))]
        allowed = [pronoun for pronoun in shuffled if (verb, pronoun) not in self.held_out]
        pronouns = allowed[: rng.integers(*_CLAUSES, endpoint=True)]
        if held_out:
            excluded = [pronoun for pronoun in shuffled if pronoun not in allowed]
            pronouns[rng.integers(1, len(pronouns))] = excluded[0]
        english: list[str] = []
        spanish: list[str] = []
        for pronoun in pronouns:
            adverb, translation = self._adverb(rng)
            english += [",", pronoun, *adverb, english_form(verb, tense, pronoun)]
            spanish += [",", PRONOUNS[pronoun], *translation, spanish_form(verb, tense, pronoun)]
        return Line((*english[1:], "=", *spanish[1:]), verb)

    def repeat(self, rng: np.random.Generator) -> Line:
        """Draw a repeated sequence, as long as the longest sentence."""
        prefix, period = (rng.integers(*bounds, endpoint=True) for bounds in (_PREFIX, _PERIOD))
        # Distinct words, so that every earlier copy belongs to the repetition.
        ordinary = np.arange(len(SPECIALS), len(self.vocabulary))
        drawn = rng.choice(ordinary, prefix + period, replace=False)
        words = [self.vocabulary[number] for number in drawn]
        while len(words) < self.longest:
            words.append(words[-period])
        return Line(tuple(words), None)

    def _adverb(self, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """An adverb in both languages, or nothing in both."""
        if rng.random() >= self.adverb_share:
            return [], []
        adverb = _ADVERBS[rng.integers(len(_ADVERBS))]
        return [adverb], [ADVERBS[adverb]]


_VERBS, _PRONOUNS, _ADVERBS = tuple(VERBS), tuple(PRONOUNS), tuple(ADVERBS)


def _words() -> list[str]:
    """Every word once, in a fixed order."""
    forms = [(verb, tense, pronoun) for verb in VERBS for tense in TENSES for pronoun in PRONOUNS]
    english = [*PRONOUNS, *ADVERBS, *(english_form(*form) for form in forms)]
    spanish = [*PRONOUNS.values(), *ADVERBS.values(), *(spanish_form(*form) for form in forms)]
    return list(dict.fromkeys([",", "=", *english, *spanish]))
