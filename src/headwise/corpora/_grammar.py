"""A small English–Spanish grammar: its words, its lines, and their gold relations."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from headwise.errors import ArgumentError

PRONOUNS: Mapping[str, str] = {
    "I": "yo",
    "you": "tú",
    "he": "él",
    "she": "ella",
    "we": "nosotros",
    "y'all": "ustedes",
    "they": "ellos",
}
ADVERBS: Mapping[str, str] = {
    "always": "siempre",
    "never": "nunca",
    "also": "también",
    "now": "ahora",
    "already": "ya",
    "rarely": "raramente",
    "usually": "normalmente",
}
TENSES = ("present", "past")  # the past is the English simple past, the Spanish imperfect

# fmt: off
VERBS: Mapping[str, str] = {
    "work": "trabajar", "talk": "hablar", "sing": "cantar", "dance": "bailar", "cook": "cocinar",
    "buy": "comprar", "watch": "mirar", "swim": "nadar", "carry": "llevar", "study": "estudiar",
    "eat": "comer", "drink": "beber", "run": "correr", "learn": "aprender", "sell": "vender",
    "break": "romper",
    "live": "vivir", "write": "escribir", "open": "abrir", "climb": "subir",
    "receive": "recibir", "share": "compartir",
    "be": "ser", "have": "tener", "go": "ir", "do": "hacer", "say": "decir", "see": "ver",
    "want": "querer", "sleep": "dormir",
}
_PERSON = {"I": 0, "you": 1, "he": 2, "she": 2, "we": 3, "y'all": 4, "they": 4}

_ENGLISH_PAST = {
    "sing": "sang", "buy": "bought", "swim": "swam", "eat": "ate", "drink": "drank",
    "run": "ran", "sell": "sold", "break": "broke", "write": "wrote", "have": "had",
    "go": "went", "do": "did", "say": "said", "see": "saw", "sleep": "slept",
}
_ENGLISH_IRREGULAR = {
    ("be", "present"): "am are is are are",
    ("be", "past"): "was were was were were",
    ("have", "present"): "have have has have have",
}
_SPANISH_IRREGULAR = {
    ("ser", "present"): "soy eres es somos son",
    ("ser", "past"): "era eras era éramos eran",
    ("tener", "present"): "tengo tienes tiene tenemos tienen",
    ("ir", "present"): "voy vas va vamos van",
    ("ir", "past"): "iba ibas iba íbamos iban",
    ("hacer", "present"): "hago haces hace hacemos hacen",
    ("decir", "present"): "digo dices dice decimos dicen",
    ("ver", "present"): "veo ves ve vemos ven",
    ("ver", "past"): "veía veías veía veíamos veían",
    ("querer", "present"): "quiero quieres quiere queremos quieren",
    ("dormir", "present"): "duermo duermes duerme dormimos duermen",
}
_SPANISH_ENDINGS = {
    ("ar", "present"): "o as a amos an",
    ("er", "present"): "o es e emos en",
    ("ir", "present"): "o es e imos en",
    ("ar", "past"): "aba abas aba ábamos aban",
    ("er", "past"): "ía ías ía íamos ían",
    ("ir", "past"): "ía ías ía íamos ían",
}
# fmt: on


def english_form(verb: str, tense: str, pronoun: str) -> str:
    """The form of an English verb beside a pronoun: `carry`, present, she: `carries`."""
    if (verb, tense) in _ENGLISH_IRREGULAR:
        return _ENGLISH_IRREGULAR[verb, tense].split()[_PERSON[pronoun]]
    if tense == "past":
        return _ENGLISH_PAST.get(verb) or _with_ed(verb)
    return _with_s(verb) if pronoun in ("he", "she") else verb


def spanish_form(verb: str, tense: str, pronoun: str) -> str:
    """The form of the Spanish verb that translates it: `carry`, present, she: `lleva`.

    Latin American: `ustedes` takes the form of `ellos`.
    """
    infinitive, person = VERBS[verb], _PERSON[pronoun]
    if (infinitive, tense) in _SPANISH_IRREGULAR:
        return _SPANISH_IRREGULAR[infinitive, tense].split()[person]
    stem, ending = infinitive[:-2], infinitive[-2:]
    return stem + _SPANISH_ENDINGS[ending, tense].split()[person]


def _with_s(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if _ends_in_consonant_y(verb) else verb + "s"


def _with_ed(verb: str) -> str:
    if verb.endswith("e"):
        return verb + "d"
    return verb[:-1] + "ied" if _ends_in_consonant_y(verb) else verb + "ed"


def _ends_in_consonant_y(verb: str) -> bool:
    return verb.endswith("y") and verb[-2] not in "aeiou"


SPECIALS = PAD, BOS, EOS, UNK = ("<pad>", "<bos>", "<eos>", "<unk>")

RELATIONS: Mapping[str, str] = {
    "previous token": "a token → the token before it",
    "subject": "a verb → its subject",
    "same stem": "a verb → earlier forms of the same verb in the same language",
    "verb translation": "a Spanish verb → the English verb it translates",
    "pronoun translation": "a Spanish pronoun → the English pronoun it translates",
    "next subject": "the word before a verb → the subject of that verb",
    "next same stem": "the word before a verb → earlier forms of that verb in its language",
    "next verb translation": "the word before a Spanish verb → the English verb it will translate",
    "next pronoun translation": "the word before a Spanish pronoun → the English pronoun it will "
    "translate",
    "earlier copy": "a word of a repeated sequence → the same word earlier",
    "after earlier copy": "a word of a repeated sequence → the word after its earlier copy",
}

Pairs = list[tuple[int, int]]

_TAGS = {",": ",", "=": "=", PAD: "_", BOS: "^", EOS: "$"}
_TAGS |= dict.fromkeys(PRONOUNS, "P") | dict.fromkeys(PRONOUNS.values(), "p")
_TAGS |= dict.fromkeys(ADVERBS, "A") | dict.fromkeys(ADVERBS.values(), "a")
_LEMMAS: dict[str, str] = {}  # a form in either language -> its English verb
for _verb in VERBS:
    for _tense in TENSES:
        for _pronoun in PRONOUNS:
            _english = english_form(_verb, _tense, _pronoun)
            _spanish = spanish_form(_verb, _tense, _pronoun)
            _TAGS |= {_english: "V", _spanish: "v"}
            _LEMMAS |= {_english: _verb, _spanish: _verb}

# A line of the grammar, or the beginning of one, such as a prompt.
_SENTENCE = re.compile(r"_* \^? (PA?V,)* ( (PA?V?)? | PA?V= (pa?v,)* (pa?v?)? ) \$? _*", re.VERBOSE)


def relations(words: Sequence[str]) -> dict[str, Pairs]:
    """The pairs (query, key) of every relation of `RELATIONS` in a line.

    Positions count all words, special tokens included; padding is neither query nor key, and no
    key comes after its query. Relations of grammar are empty unless the line is one of the
    grammar or the beginning of one. Relations of copying are empty if it is, because there a
    repeated comma is no copy.
    """
    tags = "".join(_TAGS.get(word, "?") for word in words)
    real = [position for position, word in enumerate(words) if word != PAD]
    pairs: dict[str, Pairs] = {name: [] for name in RELATIONS}
    pairs["previous token"] = [(query, query - 1) for query in real if query - 1 in real]
    if _SENTENCE.fullmatch(tags):
        return pairs | _grammar_relations(words, tags)
    pairs["earlier copy"] = [
        (query, key) for query in real for key in range(query) if words[key] == words[query]
    ]
    pairs["after earlier copy"] = [(query, copy + 1) for query, copy in pairs["earlier copy"]]
    return pairs


def _grammar_relations(words: Sequence[str], tags: str) -> dict[str, Pairs]:
    clauses = re.finditer("PA?V|pa?v", tags)
    # The halves are parallel; either may be unfinished.
    verbs = zip(_positions(tags, "v"), _positions(tags, "V"), strict=False)
    pronouns = zip(_positions(tags, "p"), _positions(tags, "P"), strict=False)
    pairs = {
        "subject": [(clause.end() - 1, clause.start()) for clause in clauses],
        "same stem": _same_stem(words, _positions(tags, "V"))
        + _same_stem(words, _positions(tags, "v")),
        "verb translation": [
            (verb, source)
            for verb, source in verbs
            if _LEMMAS[words[verb]] == _LEMMAS[words[source]]
        ],
        "pronoun translation": [
            (pronoun, source)
            for pronoun, source in pronouns
            if words[pronoun] == PRONOUNS[words[source]]
        ],
    }
    # The same keys for the token before each query, which predicts it.
    earlier = {
        f"next {name}": [(query - 1, key) for query, key in relation if key < query]
        for name, relation in pairs.items()
    }
    return pairs | earlier


def _positions(tags: str, tag: str) -> list[int]:
    return [position for position, char in enumerate(tags) if char == tag]


def _same_stem(words: Sequence[str], verbs: Sequence[int]) -> Pairs:
    return [
        (verb, before)
        for verb in verbs
        for before in verbs
        if before < verb and _LEMMAS[words[before]] == _LEMMAS[words[verb]]
    ]


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
