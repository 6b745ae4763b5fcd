"""The gold relations of lines of the grammar, computed from their words alone."""

import re
from collections.abc import Mapping, Sequence

from headwise.corpora._verbs import ADVERBS, PRONOUNS, TENSES, VERBS, english_form, spanish_form

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
