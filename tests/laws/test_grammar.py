"""Laws of the generated grammar, and its forms compared with full paradigms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.corpora import BOS, EOS, PAD, RELATIONS, SPECIALS, Grammar, relations
from headwise.corpora._grammar import ADVERBS, PRONOUNS, TENSES, VERBS, english_form, spanish_form

GRAMMAR = Grammar()
SISTERS = ({"he", "she"}, {"y'all", "they"})
seeds = st.integers(0, 2**32 - 1)


def words_of(text):
    return text.split()


def sentence(seed, held_out=False, grammar=GRAMMAR):
    return grammar.sentence(np.random.default_rng(seed), held_out)


def repeat(seed):
    return GRAMMAR.repeat(np.random.default_rng(seed))


def halves(line):
    """The clauses of both languages, each a list of words."""
    english, spanish = str(line).split(" = ")
    return [[c.split() for c in half.split(" , ")] for half in (english, spanish)]


def translate(words):
    """Translate an English clause by the tables; there must be exactly one way."""
    pronoun, *adverbs, form = words
    forms = {
        spanish_form(verb, tense, pronoun)
        for verb in VERBS
        for tense in TENSES
        if english_form(verb, tense, pronoun) == form
    }
    assert len(forms) == 1
    return [PRONOUNS[pronoun], *(ADVERBS[adverb] for adverb in adverbs), forms.pop()]


@given(seeds, st.booleans())
def test_every_sentence_parses_and_its_second_half_translates_the_first(seed, held_out):
    line = sentence(seed, held_out)
    english, spanish = halves(line)
    assert 2 <= len(english) <= 4
    assert spanish == [translate(clause) for clause in english]
    assert len({clause[0] for clause in english}) == len(english)
    tenses = [
        {tense for tense in TENSES if english_form(line.verb, tense, clause[0]) == clause[-1]}
        for clause in english
    ]
    assert set.intersection(*tenses)  # one verb in one tense


@given(seeds)
def test_held_out_combinations_occur_only_on_request(seed):
    line, held_out_line = sentence(seed), sentence(seed, held_out=True)
    english, _ = halves(line)
    assert not {(line.verb, clause[0]) for clause in english} & GRAMMAR.held_out
    clauses = [(held_out_line.verb, clause[0]) for clause in halves(held_out_line)[0]]
    assert [cell for cell in clauses if cell in GRAMMAR.held_out] != []
    assert clauses[0] not in GRAMMAR.held_out
    assert sum(cell in GRAMMAR.held_out for cell in clauses) == 1


def test_over_many_draws_every_form_occurs_except_held_out_ones():
    rng = np.random.default_rng(0)
    lines = [GRAMMAR.line(rng) for _ in range(4000)]
    met = {(line.verb, clause[0]) for line in lines if line.verb for clause in halves(line)[0]}
    every = {(verb, pronoun) for verb in VERBS for pronoun in PRONOUNS}
    assert met == every - GRAMMAR.held_out


@given(seeds)
def test_one_sister_of_each_pair_is_held_out_for_every_verb(seed):
    held_out = Grammar(seed).held_out
    for verb in VERBS:
        pronouns = {pronoun for sister, pronoun in held_out if sister == verb}
        assert [len(pronouns & pair) for pair in SISTERS] == [1, 1]
        assert len(pronouns) == 2


def test_the_seed_decides_the_held_out_combinations():
    assert Grammar(3).held_out == Grammar(3).held_out
    assert Grammar(3).held_out != Grammar(5).held_out


@given(seeds)
def test_the_same_draws_give_the_same_line(seed):
    first, second = (GRAMMAR.line(np.random.default_rng(seed)) for _ in range(2))
    assert first == second


@given(seeds, st.booleans())
def test_a_line_uses_the_vocabulary_and_is_never_longer_than_it_says(seed, held_out):
    line = GRAMMAR.line(np.random.default_rng(seed), held_out)
    assert set(line.words) <= set(GRAMMAR.vocabulary) - set(SPECIALS)
    assert len(line.words) <= Grammar.longest


def test_the_vocabulary_starts_with_the_special_tokens_and_has_every_word_once():
    vocabulary = GRAMMAR.vocabulary
    assert vocabulary[:4] == SPECIALS == ("<pad>", "<bos>", "<eos>", "<unk>")
    assert len(set(vocabulary)) == len(vocabulary)
    assert Grammar(7, 0.1, 0.9).vocabulary == vocabulary


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_shares_of_line_kinds_are_kept(share):
    rng = np.random.default_rng(0)
    grammar = Grammar(repeat_share=share)
    lines = [grammar.line(rng) for _ in range(600)]
    assert sum(line.verb is None for line in lines) / 600 == pytest.approx(share, abs=0.06)
    grammar = Grammar(adverb_share=share)
    clauses = [clause for _ in range(300) for clause in halves(grammar.sentence(rng))[0]]
    assert sum(len(clause) == 3 for clause in clauses) / len(clauses) == pytest.approx(
        share, abs=0.06
    )


# Translation is a function: a word belongs to one language and one part of speech, a form to
# one verb and one tense.


def test_no_form_belongs_to_two_verbs_or_two_tenses():
    for form in (english_form, spanish_form):
        owners: dict[str, set[tuple[str, str]]] = {}
        for verb in VERBS:
            for tense in TENSES:
                for pronoun in PRONOUNS:
                    owners.setdefault(form(verb, tense, pronoun), set()).add((verb, tense))
        assert {word: owned for word, owned in owners.items() if len(owned) > 1} == {}


def test_no_word_has_two_parts_of_speech_or_languages():
    cells = [(verb, tense, pronoun) for verb in VERBS for tense in TENSES for pronoun in PRONOUNS]
    groups = [
        {english_form(*cell) for cell in cells},
        {spanish_form(*cell) for cell in cells},
        set(PRONOUNS), set(PRONOUNS.values()), set(ADVERBS), set(ADVERBS.values()), {",", "="},
    ]  # fmt: skip
    assert sum(map(len, groups)) == len(set.union(*groups))


def test_he_and_she_share_every_form_and_so_do_yall_and_they():
    for verb in VERBS:
        for tense in TENSES:
            for pronoun, sister in SISTERS:
                for form in (english_form, spanish_form):
                    assert form(verb, tense, pronoun) == form(verb, tense, sister)


SPANISH = {
    ("work", "present"): "trabajo trabajas trabaja trabajamos trabajan",
    ("work", "past"): "trabajaba trabajabas trabajaba trabajábamos trabajaban",
    ("eat", "present"): "como comes come comemos comen",
    ("eat", "past"): "comía comías comía comíamos comían",
    ("live", "present"): "vivo vives vive vivimos viven",
    ("live", "past"): "vivía vivías vivía vivíamos vivían",
    ("be", "present"): "soy eres es somos son",
    ("be", "past"): "era eras era éramos eran",
    ("have", "present"): "tengo tienes tiene tenemos tienen",
    ("have", "past"): "tenía tenías tenía teníamos tenían",
    ("go", "present"): "voy vas va vamos van",
    ("go", "past"): "iba ibas iba íbamos iban",
    ("do", "present"): "hago haces hace hacemos hacen",
    ("do", "past"): "hacía hacías hacía hacíamos hacían",
    ("say", "present"): "digo dices dice decimos dicen",
    ("say", "past"): "decía decías decía decíamos decían",
    ("see", "present"): "veo ves ve vemos ven",
    ("see", "past"): "veía veías veía veíamos veían",
    ("want", "present"): "quiero quieres quiere queremos quieren",
    ("want", "past"): "quería querías quería queríamos querían",
    ("sleep", "present"): "duermo duermes duerme dormimos duermen",
    ("sleep", "past"): "dormía dormías dormía dormíamos dormían",
}
ENGLISH = {  # I, he, we; then the past
    "work": "work works work worked", "watch": "watch watches watch watched",
    "carry": "carry carries carry carried", "study": "study studies study studied",
    "dance": "dance dances dance danced", "buy": "buy buys buy bought",
    "sing": "sing sings sing sang", "swim": "swim swims swim swam", "eat": "eat eats eat ate",
    "drink": "drink drinks drink drank", "run": "run runs run ran", "sell": "sell sells sell sold",
    "break": "break breaks break broke", "write": "write writes write wrote",
    "have": "have has have had", "go": "go goes go went", "do": "do does do did",
    "say": "say says say said", "see": "see sees see saw", "sleep": "sleep sleeps sleep slept",
    "live": "live lives live lived", "open": "open opens open opened",
}  # fmt: skip


def test_spanish_paradigms():
    pronouns = ("I", "you", "he", "we", "they")
    formed = {cell: " ".join(spanish_form(*cell, who) for who in pronouns) for cell in SPANISH}
    assert formed == SPANISH


def test_english_paradigms():
    for verb, paradigm in ENGLISH.items():
        *present, past = paradigm.split()
        assert [english_form(verb, "present", who) for who in ("I", "he", "we")] == present
        assert {english_form(verb, "past", who) for who in PRONOUNS} == {past}


def test_the_english_verb_to_be():
    present = [english_form("be", "present", pronoun) for pronoun in PRONOUNS]
    past = [english_form("be", "past", pronoun) for pronoun in PRONOUNS]
    assert list(PRONOUNS) == ["I", "you", "he", "she", "we", "y'all", "they"]
    assert present == ["am", "are", "is", "is", "are", "are", "are"]
    assert past == ["was", "were", "was", "was", "were", "were", "were"]


# Relations.


def test_relations_of_a_written_out_line():
    words = words_of("<bos> I work , he never works = yo trabajo , él nunca trabaja <eos> <pad>")
    #          0   1   2  3  4   5     6   7  8     9   10 11   12     13     14    15
    assert {name: sorted(pairs) for name, pairs in relations(words).items()} == {
        "previous token": [(position, position - 1) for position in range(1, 15)],
        "subject": [(2, 1), (6, 4), (9, 8), (13, 11)],
        "same stem": [(6, 2), (13, 9)],
        "verb translation": [(9, 2), (13, 6)],
        "pronoun translation": [(8, 1), (11, 4)],
        "next subject": [(1, 1), (5, 4), (8, 8), (12, 11)],
        "next same stem": [(5, 2), (12, 9)],
        "next verb translation": [(8, 2), (12, 6)],
        "next pronoun translation": [(7, 1), (10, 4)],
        "earlier copy": [],
        "after earlier copy": [],
    }


def test_a_wrong_translation_is_no_relation():
    relation_pairs = relations(words_of("I eat , he eats = yo como , ella vivía"))
    assert relation_pairs["verb translation"] == [(7, 1)]
    assert relation_pairs["pronoun translation"] == [(6, 0)]
    assert relation_pairs["same stem"] == [(4, 1)]


@given(seeds, st.integers(0, 40))
def test_relations_hold_in_every_prefix_of_a_line(seed, length):
    words = [BOS, *sentence(seed).words, EOS]
    whole, part = relations(words), relations(words[:length])
    for name, pairs in part.items():
        # At the end of a prefix the next word is unknown.
        assert set(pairs) <= set(whole[name])
        assert set(pairs) >= {(q, k) for q, k in whole[name] if q < length - 1}


@given(seeds)
def test_relations_point_at_the_described_words(seed):
    words = (BOS, *sentence(seed).words, EOS, PAD)
    relation_pairs = relations(words)
    equals = words.index("=")
    clauses = words.count(",") // 2 + 1
    assert len(relation_pairs["subject"]) == 2 * clauses
    assert (
        len(relation_pairs["verb translation"])
        == len(relation_pairs["pronoun translation"])
        == clauses
    )
    assert len(relation_pairs["same stem"]) == clauses * (clauses - 1)
    for verb, subject in relation_pairs["subject"]:
        assert words[subject] in {*PRONOUNS, *PRONOUNS.values()}
        assert verb - subject in (1, 2)
    for target, source in relation_pairs["pronoun translation"]:
        assert words[target] == PRONOUNS[words[source]]
    for target, source in (
        relation_pairs["verb translation"] + relation_pairs["pronoun translation"]
    ):
        assert source < equals < target
    for name in ("subject", "same stem", "verb translation", "pronoun translation"):
        assert relation_pairs[f"next {name}"] == [
            (query - 1, key) for query, key in relation_pairs[name]
        ]


@given(seeds)
def test_the_word_after_the_earlier_copy_comes_next(seed):
    words = (BOS, *repeat(seed).words)
    relation_pairs = relations(words)
    assert relation_pairs["earlier copy"]
    for query, key in relation_pairs["earlier copy"]:
        assert words[query] == words[key]
    for query, key in relation_pairs["after earlier copy"]:
        assert key <= query
        assert query + 1 == len(words) or words[query + 1] == words[key]


@given(seeds)
def test_repetitions_have_no_delimiter_and_vary_in_distance(seed):
    distances = {
        query - key
        for offset in range(40)
        for query, key in relations(repeat(seed + offset).words)["earlier copy"][:1]
    }
    assert len(distances) > 5
    assert distances <= set(range(5, 17))


@given(seeds, st.booleans())
def test_every_relation_has_a_sentence_and_no_key_after_its_query(seed, held_out):
    words = (BOS, *GRAMMAR.line(np.random.default_rng(seed), held_out).words, EOS, PAD, PAD)
    relation_pairs = relations(words)
    assert relation_pairs.keys() == RELATIONS.keys()
    for pairs in relation_pairs.values():
        assert len(set(pairs)) == len(pairs)
        assert all(0 <= key <= query < len(words) - 2 for query, key in pairs)


def test_padding_on_either_side_is_in_no_relation():
    words = words_of("<bos> I work , he works")
    shifted = relations([PAD, PAD, *words, PAD])
    for name, pairs in relations(words).items():
        assert shifted[name] == [(query + 2, key + 2) for query, key in pairs]


def test_no_words_have_no_relations():
    assert all(pairs == [] for pairs in relations([]).values())
