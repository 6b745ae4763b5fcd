"""Laws of annotated texts: spans spell their words, and arcs form trees."""

import json
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
    read_aligned,
    read_conllu,
    read_gap,
    read_jsonl,
    read_winobias,
)

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


def test_winobias_brackets_become_mentions(tmp_path):
    line = "12 [The developer ] met the clerk because [she] sang."
    (text,) = read_winobias(written(tmp_path, line + "\n"))
    assert text.text == "The developer  met the clerk because she sang."
    spans = [text.text[mention.start : mention.end] for mention in text.mentions]
    assert spans == ["The developer", "she"]
    assert {mention.entity for mention in text.mentions} == {0}


def test_the_other_person_of_a_winobias_sentence_is_known_from_its_pair(tmp_path):
    lines = [
        "1 [The developer] met the clerk because [she] sang.",
        "2 The developer met [the clerk] because [he] sang.",
    ]
    for text, right in zip(read_winobias(written(tmp_path, "\n".join(lines))), (0, 1), strict=True):
        people = [mention for mention in text.mentions if not mention.pronoun]
        names = sorted((text.text[m.start : m.end].lower(), m.entity == 0) for m in people)
        assert names == [("the clerk", right == 1), ("the developer", right == 0)]
        assert sum(mention.pronoun for mention in text.mentions) == 1


@pytest.mark.parametrize(
    ("lines", "people"),
    [
        # A phrase within a longer one, within a word, within brackets or in capitals.
        (("[The cook] saw [her] maid.", "[The cook's maid] ran and [she] sang."), 1),
        (("[The cook] saw [her] cat.", "[A man] met the cooks and [he] ran."), 1),
        (("[The cook] saw [her] cat.", "THE COOK met [a man] and [he] ran."), 2),
        (
            ("[The cook] saw [her] cat.", "The cook met the cook when [the cook] sang [her] song."),
            3,
        ),
    ],
)
def test_people_outside_of_brackets_are_whole_phrases(tmp_path, lines, people):
    *_, last = read_winobias(written(tmp_path, "\n".join(lines)))
    assert sum(not mention.pronoun for mention in last.mentions) == people
    spans = sorted((mention.start, mention.end) for mention in last.mentions)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_pronouns_are_known_by_the_annotation_or_by_their_tag(tmp_path):
    line = (
        '{"text": "Ann saw her", "words": [[0, 3], [4, 7], [8, 11]], '
        '"tags": ["PROPN", "VERB", "PRON"], "mentions": [[0, 3, 0], [8, 11, 0], [0, 7, 1, true]]}'
    )
    (text,) = read_jsonl(written(tmp_path, line))
    assert [text.is_pronoun(mention) for mention in text.mentions] == [False, True, True]


def test_aligned_texts_share_one_context(tmp_path):
    paths = [
        written(tmp_path, "the green house\na\n", "en"),
        written(tmp_path, "la casa verde\nb\n", "es"),
        written(tmp_path, "0-0 1-2 2-1\n\n", "links"),
    ]
    first, second = read_aligned(*paths, joint=" = ")
    assert first.text == "the green house = la casa verde"
    pairs = [(first.word(source), first.word(target)) for source, target in first.links]
    assert pairs == [("la", "the"), ("verde", "green"), ("casa", "house")]
    assert second.links == ()


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
    gold = grammar.relations(line.words)
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
        "links": text.links,
    }
    path = tmp_path_factory.mktemp("json") / "texts.jsonl"
    path.write_text(json.dumps(said) + "\n\n" + json.dumps({"text": "bare"}), "utf-8")
    assert read_jsonl(path) == [text, AnnotatedText("bare")]


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
