"""Laws of annotated texts: spans spell their words, and arcs form trees."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.corpora import (
    AnnotatedText,
    Arc,
    Grammar,
    Mention,
    annotate,
    choices,
    read_conllu,
    read_gap,
    read_jsonl,
    relations,
)
from headwise.roles.scores import TagRows, fit_tag_rules
from headwise.roles.scores._tag_rules import FAR, SIDES, _fit, _rule_values

seeds = st.integers(0, 2**32 - 1)

CONTRACTIONS = """\
# sent_id = 1
# text = Don't  go du coin!
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod:neg\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_
3.1\tgone\tgo\tVERB\t_\t_\t_\t_\t0:root\t_
4-5\tdu\t_\t_\t_\t_\t_\t_\t_\t_
4\tde\tde\tADP\t_\t_\t6\tcase\t_\t_
5\tle\tle\tDET\t_\t_\t6\tdet\t_\t_
6\tcoin\tcoin\tNOUN\t_\t_\t3\tobl\t_\tSpaceAfter=No
7\t!\t!\tPUNCT\t_\t_\t3\tpunct\t_\t_

# newdoc
1\tIt\tit\tPRON\t_\t_\t2\tnsubj\t_\t_
2\tworks\twork\tVERB\t_\t_\t0\troot\t_\tSpaceAfter=No
3\t.\t.\tPUNCT\t_\t_\t2\tpunct\t_\t_
"""


def written(folder, text, name="corpus"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def words_of(text):
    return [text.word(index) for index in range(len(text.words))]


def test_conllu_words_lie_on_the_raw_text(tmp_path):
    first, second = read_conllu(written(tmp_path, CONTRACTIONS))
    assert first.text == "Don't  go du coin!"
    assert words_of(first) == ["Do", "n't", "go", "du", "du", "coin", "!"]
    assert first.tags == ("AUX", "PART", "VERB", "ADP", "DET", "NOUN", "PUNCT")
    assert Arc(1, 2, "advmod:neg") in first.arcs
    assert len(first.arcs) == 6  # the root has no head
    assert second.text == "It works."
    assert words_of(second) == ["It", "works", "."]


def test_a_sentence_without_heads_has_no_tree(tmp_path):
    lines = [f"{index}\t{word}" + "\t_" * 8 for index, word in enumerate(["A", "b"], 1)]
    (text,) = read_conllu(written(tmp_path, "\n".join(lines)))
    assert (text.text, text.arcs, text.tags) == ("A b", (), ())


def test_gap_mentions_lie_at_their_offsets(tmp_path):
    header = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL"
    row = "1\tAnn met Bea when she sang.\tshe\t17\tAnn\t0\tTRUE\tBea\t8\tFALSE\thttp://x"
    (text,) = read_gap(written(tmp_path, f"{header}\n{row}\n"))
    assert text.mentions == (Mention(17, 20, 0, pronoun=True), Mention(0, 3, 0), Mention(8, 11, 2))


def test_pronouns_are_known_by_the_annotation_or_by_their_tag(tmp_path):
    line = (
        '{"text": "Ann saw her", "words": [[0, 3], [4, 7], [8, 11]], '
        '"tags": ["PROPN", "VERB", "PRON"], "mentions": [[0, 3, 0], [8, 11, 0], [0, 7, 1, true]]}'
    )
    (text,) = read_jsonl(written(tmp_path, line))
    assert [text.is_pronoun(mention) for mention in text.mentions] == [False, True, True]


@given(seeds, st.booleans())
def test_the_grammar_knows_its_trees_mentions_and_links(seed, repeated):
    grammar, rng = Grammar(), np.random.default_rng(seed)
    line = grammar.repeat(rng) if repeated else grammar.sentence(rng)
    text = annotate(line)
    assert tuple(words_of(text)) == line.words
    if repeated:
        assert text == AnnotatedText(str(line), text.words)
        return
    # One root, so every other word has its head; the constructor has refused circles.
    assert len(text.arcs) == len(text.words) - 1
    gold = relations(line.words)
    arcs = [(arc.dependent, arc.head, arc.relation) for arc in text.arcs]
    assert {(head, word) for word, head, name in arcs if name == "nsubj"} == set(gold["subject"])
    translations = {*gold["verb translation"], *gold["pronoun translation"]}
    assert translations <= set(text.links)
    others = set(text.links) - translations
    assert all(text.tags[word] == text.tags[aligned] == "ADV" for word, aligned in others)
    entities = [[m for m in text.mentions if m.entity == e] for e in range(len(text.mentions) // 2)]
    spans = {tuple(sorted((m.start, m.end) for m in pair)) for pair in entities}
    pronouns = gold["pronoun translation"]
    assert spans == {tuple(sorted((text.words[i], text.words[j]))) for i, j in pronouns}


@given(seeds)
def test_json_lines_keep_everything(tmp_path_factory, seed):
    text = annotate(Grammar().sentence(np.random.default_rng(seed)))
    said = {
        "text": text.text,
        "words": text.words,
        "tags": text.tags,
        "arcs": [(arc.dependent, arc.head, arc.relation) for arc in text.arcs],
        "mentions": [(mention.start, mention.end, mention.entity) for mention in text.mentions],
    }
    path = tmp_path_factory.mktemp("json") / "texts.jsonl"
    path.write_text(json.dumps(said) + "\n\n" + json.dumps({"text": "bare"}), "utf-8")
    assert read_jsonl(path) == [replace(text, links=()), AnnotatedText("bare")]


@given(st.lists(st.integers(-1, 6), min_size=1, max_size=7))
def test_arcs_are_accepted_exactly_when_they_have_no_cycle(heads):
    n = len(heads)
    spans = tuple(pairwise(range(n + 1)))
    arcs = tuple(Arc(index, head % n, "dep") for index, head in enumerate(heads) if head >= 0)
    towards = {arc.dependent: arc.head for arc in arcs}

    def comes_to_an_end(index):
        for _ in range(n + 1):
            if index not in towards:
                return True
            index = towards[index]
        return False

    if all(comes_to_an_end(index) for index in range(n)):
        assert AnnotatedText("x" * n, spans, arcs=arcs).arcs == arcs
    else:
        with pytest.raises(ValueError, match="form a cycle"):
            AnnotatedText("x" * n, spans, arcs=arcs)


# Choices of the grammar: the right word and another form of the same verb.


GRAMMAR = Grammar()


def drawn(n: int = 300) -> list:
    rng = np.random.default_rng(3)
    return [GRAMMAR.sentence(rng) for _ in range(n)]


@pytest.mark.parametrize("apart", [False, True])
def test_the_right_word_is_in_the_line_and_the_wrong_word_is_another_form(apart: bool) -> None:
    lines = drawn()
    result = choices(lines, apart)
    texts = [str(line) for line in lines]
    assert 200 < len(result) <= len(lines)
    for choice in result:
        assert any(text.startswith(f"{choice.before} {choice.right}") for text in texts)
        assert choice.right != choice.wrong in GRAMMAR.vocabulary
        # The wrong form would be right beside another subject, so it is a form of the same verb.
        words = (*choice.before.split(), choice.right)
        subject = dict(relations(words)["subject"])[len(words) - 1]
        assert (len(words) - 1 - subject > 1) == apart
    assert {"=" in choice.before.split() for choice in result} == {False, True}


def test_the_first_verb_of_a_line_is_never_tested() -> None:
    for choice in choices(drawn(), apart=False):
        assert relations(choice.before.split())["subject"]


def test_a_repeated_sequence_has_no_choice() -> None:
    assert choices([GRAMMAR.repeat(np.random.default_rng(0))], apart=False) == []


def test_the_seed_decides_which_verb_is_tested() -> None:
    lines = drawn(40)
    assert choices(lines, False, seed=1) == choices(lines, False, seed=1)
    assert choices(lines, False, seed=1) != choices(lines, False, seed=2)


# Rules of parts of speech are as strong as they can be.


TAGS = ("A", "B", "C", "D")


def rows_of(sentences, gold, role=0):
    """The rows of sentences of tags, where `gold` gives the key of each query or None."""
    item, tag, distance, right = [], [], [], []
    for number, words in enumerate(sentences):
        for query, own in enumerate(words):
            key = gold(words, query)
            if key is None:
                continue
            near = np.full((len(SIDES), 2, len(TAGS)), FAR, dtype=np.int16)
            hit = np.zeros(near.shape, dtype=bool)
            for column, name in enumerate(TAGS):
                places = [place for place in range(len(words)) if words[place] == name]
                left = [place for place in reversed(places) if place < query]
                after = [place for place in places if place > query]
                for side, keys in enumerate((left, after)):
                    for rank, place in enumerate(keys[:2]):
                        near[side, rank, column] = abs(place - query)
                        hit[side, rank, column] = place == key
            item.append(number)
            tag.append(TAGS.index(own))
            distance.append(near)
            right.append(hit)
    n = len(item)
    return TagRows(
        item=np.array(item),
        role=np.full(n, role),
        tag=np.array(tag),
        chance=np.full(n, 0.1, dtype=np.float32),
        distance=np.array(distance),
        right=np.array(right),
        offsets=np.zeros((n, 21), dtype=np.float32),
    )


def tagged(rng, n=60):
    return [rng.choice(TAGS, rng.integers(4, 12)).tolist() for _ in range(n)]


def nearest(tags, side=1, rank=0):
    def key(words, query):
        step = range(query + 1, len(words)) if side > 0 else range(query - 1, -1, -1)
        found = [place for place in step if words[place] in tags]
        return found[rank] if len(found) > rank else None

    return key


def own_class(words, query):
    return nearest({words[query]}, -1)(words, query)


def by_class(words, query):
    """To the right for some classes, to the left for others."""
    tags, side = {"A": ("B", 1), "B": ("C", -1)}.get(words[query], ("D", 1))
    return nearest({tags}, side)(words, query)


@pytest.mark.parametrize(
    ("gold", "kind", "name"),
    [
        (nearest({"A"}), "class", "nearest A to the right"),
        (nearest({"A", "C"}), "set", "nearest A/C to the right"),
        (nearest({"B", "C", "D"}, -1), "set", "nearest B/C/D to the left"),
        (nearest({"A", "C"}, rank=1), "set", "second nearest A/C to the right"),
        (own_class, "set", "nearest its own class to the left"),
        (by_class, "by class", "a rule for each class of the query"),
    ],
)
def test_a_rule_that_explains_everything_is_found(gold, kind, name):
    rows = rows_of(tagged(np.random.default_rng(0)), gold)
    rules = fit_tag_rules(rows, np.ones(len(rows.item), dtype=bool), TAGS, 1)
    assert rules[kind][1].mean() == 1.0
    assert rules[kind][0] == [name]


@given(seeds)
def test_sets_do_what_single_classes_do_on_the_queries_that_fit_them(seed):
    rng = np.random.default_rng(seed)
    rows = rows_of(tagged(rng, 8), lambda words, query: int(rng.integers(len(words))))
    rows = TagRows(*(rows.item, rng.integers(0, 3, len(rows.item))), *list(vars(rows).values())[2:])
    selected = rng.random(len(rows.item)) < 0.6
    rules = fit_tag_rules(rows, selected, TAGS, 3)
    for role in range(3):
        chosen = selected & (rows.role == role)
        single, best, split = (
            rules[kind][1][chosen].sum() for kind in ("class", "set", "by class")
        )
        assert best >= single - 1e-4
        assert split >= single - 1e-4


@given(seeds)
def test_the_value_of_a_rule_is_that_of_the_words_it_names(seed):
    rng = np.random.default_rng(seed)
    sentences = tagged(rng, 10)
    keys = {}

    def gold(words, query):
        return keys.setdefault((id(words), query), int(rng.integers(len(words))))

    rows = rows_of(sentences, gold)
    fitted = _fit(rows, np.ones(len(rows.item), dtype=bool), rows.role)
    tags = {tag for tag, has in zip(TAGS, fitted["sets"][0], strict=True) if has}
    named = nearest(tags, 1 if fitted["side"][0] == 1 else -1, int(fitted["rank"][0]))
    expected = []
    for words in sentences:
        for query in range(len(words)):
            place = named(words, query)
            expected.append(0.1 if place is None else float(place == gold(words, query)))
    np.testing.assert_allclose(_rule_values(fitted, rows, rows.role), expected, atol=1e-6)


def test_rules_are_fitted_to_the_selected_queries_alone():
    rng = np.random.default_rng(1)
    left = rows_of(tagged(rng, 20), nearest({"A"}, -1))
    right = rows_of(tagged(rng, 20), nearest({"B"}, 1))
    rows = TagRows.joined([left, right])
    selected = np.arange(len(rows.item)) < len(left.item)
    rules = fit_tag_rules(rows, selected, TAGS, 1)
    assert rules["set"][0] == ["nearest A to the left"]
    assert rules["set"][1][selected].mean() == 1.0
    assert rules["set"][1][~selected].mean() < 0.5


def test_roles_without_a_selected_query_get_chance():
    rows = rows_of(tagged(np.random.default_rng(2), 5), nearest({"A"}))
    rules = fit_tag_rules(rows, np.zeros(len(rows.item), dtype=bool), TAGS, 1)
    for _, value in rules.values():
        np.testing.assert_allclose(value, 0.1)
    assert rules["set"][0] == [""]
