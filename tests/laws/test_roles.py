"""Heads built by hand get their roles; random heads get none."""

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from folders import tiny_t5
from headwise.corpora import AnnotatedText, Arc, Grammar, annotate
from headwise.corpora._grammar import PRONOUNS
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer
from headwise.roles import Evidence, Roles, find_roles
from headwise.roles._rows import TEXT, evidence_rows
from headwise.roles.evidence import NULLS, Hypotheses
from headwise.roles.relations import PREFIX_MATCHING, PROBED, SHAPES, Item
from headwise.roles.scores import Evaluator
from headwise.tables import Head
from planted import (
    IDS,
    NAMES,
    SHARP,
    SUBJECTS,
    TOKENIZER,
    WORDS,
    Planted,
    by_frequency,
    clauses,
    lines,
    translations,
)

TEXTS = lines(90)
ENCODER = (
    ("offset -1", "offset +1", "offset +0", "offset -3", "first"),
    ("separator", "same", "rare", "even", "any"),
)
DECODER = (("offset -1", "first", "even"), ("induction", "same", "offset -3", "separator"))


# One model of each kind of null and one split: whether a planted head is found is the same.
QUICK = Evidence(models=1, splits=1)


@pytest.fixture(scope="module")
def encoder():
    model = Planted(ENCODER, causal=False, order=by_frequency(TEXTS))
    return find_roles(model, TEXTS, tokenizer=TOKENIZER)


def test_every_column_that_the_page_explains_is_in_the_outcomes(encoder):
    page = (Path(__file__).parents[2] / "docs/research/roles.md").read_text("utf-8")
    table = page.partition("## Reading the outcome")[2].partition("**Effect.**")[0]
    columns = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M)
               for name in re.findall(r"`(\w+)`", row)]  # fmt: skip
    assert {"p_adj", "stability", "smallest"} <= {*columns}
    evidence = encoder.frame().set_index(["role", "name"])
    for row in encoder.outcomes().to_dict("records"):
        if row["nearest"]:  # its own evidence
            known = evidence.loc[(row["role"], row["nearest"])]
            assert [row[name] for name in columns] == [
                pytest.approx(known[name], nan_ok=True) if name not in ("outcome", "null")
                else row[name] for name in columns
            ]  # fmt: skip


def truth(layers):
    return {
        (f"L{layer}.H{head}", NAMES[kind])
        for layer, kinds in enumerate(layers)
        for head, kind in enumerate(kinds)
        if NAMES[kind] not in (None, *SHAPES)
    }


def shapes(roles):
    rows = roles.shapes()
    return dict(zip(rows["name"], rows["shape"], strict=True))


def found(roles):
    rows = roles.found()
    return set(zip(rows["name"], rows["role"], strict=True))


def test_exactly_the_planted_heads_of_an_encoder_are_found(encoder):
    assert found(encoder) == truth(ENCODER)


@pytest.fixture(scope="module")
def unshuffled():
    """Finds roles without nulls that cost a pass."""
    model = Planted(ENCODER, causal=False, order=by_frequency(TEXTS))
    evidence = Evidence(nulls=(), splits=1)
    return cache(partial(find_roles, model, TEXTS[:66], tokenizer=TOKENIZER, evidence=evidence))


@pytest.mark.parametrize(
    ("heads", "roles", "family"),
    [
        (("L0.H3", "L1.H4"), "offset -3", "2 heads named beforehand × 1 role named beforehand"),
        (("L1.H2", "L1.H4", "L0.H2"), None, "3 heads named beforehand × 19 roles"),
        (None, ("same token", "prefix matching"), "10 heads × 2 roles named beforehand"),
    ],
)
def test_what_is_named_beforehand_is_the_family_of_the_test(unshuffled, heads, roles, family):
    named = unshuffled(heads=heads, roles=roles)
    assert f"p adjusted over {family}" in named.notes
    assert "p adjusted over 10 heads × 19 roles" in unshuffled().notes
    columns = ["effect", "null", "baseline", "lift", "ci_low", "ci_high", "n"]
    rows, every = (x.frame().set_index(["name", "role"]) for x in (named, unshuffled()))
    pd.testing.assert_frame_equal(rows[columns], every.loc[rows.index, columns])
    assert len(rows) == np.prod([int(part.split()[0]) for part in family.split(" × ")])
    assert found(named) == {pair for pair in found(unshuffled()) if pair in rows.index}
    tested = rows["p_adj"].notna()
    # What is named by head and role is not screened, so that no p is 1 without a test.
    assert (rows["p_adj"][tested] == 1).any() == (None in (heads, roles))
    assert repr(named)
    assert named.why(rows.index[0][0])


@pytest.mark.parametrize(
    ("n", "outcome"),
    [(66, "not found"), (60, "not found"), (5, "not tested: 3 held-out groups, 30 needed")],
)
def test_texts_of_one_group_are_one_text(unshuffled, n, outcome):
    groups = tuple(number * n // 66 for number in range(66))
    alone, grouped = unshuffled(), unshuffled(groups=groups)
    held = n - n // 2
    assert grouped.notes[0] == (
        f"66 distinct texts of 66; heads, rules and null heads chosen on {n // 2}, all numbers "
        f"from the other {held}, as independent {'texts' if n == 66 else 'groups of texts'}"
    )
    row = grouped.frame().set_index(["role", "name"]).loc[("offset +5", "L0.H3")]
    assert (row["texts"], row["outcome"]) == (held, outcome)
    if n == 5:
        assert "at most 3 held-out groups, 30 needed" in grouped.why("L0.H3")
        few = "roles of text were not tested: 3 held-out groups, not 30; give 60 distinct groups of"
        assert few in str(grouped.notes)
    assert {*grouped.examples("L0.H3")["text"]} <= {*map(str, groups)}
    if n == 60:
        said = "\n".join(map(grouped.why, dict(found(grouped) - {("L1.H1", "same token")})))
        assert "held-out groups" in said
        assert "held-out texts" not in said
    if n < 66:
        assert grouped.sample["groups"] == n
    of_sequences = {("L1.H1", "same token")}  # which no group holds together
    assert of_sequences <= found(grouped) <= (found(alone) if n > 5 else of_sequences)
    if n == 66:
        assert grouped.frame().equals(alone.frame())


def test_sinks_and_diffuse_heads_stand_apart_from_roles(encoder):
    assert shapes(encoder) == {"L0.H4": "sink", "L1.H0": "sink", "L1.H3": "diffuse"}
    rows = encoder.shapes().set_index("name")
    tokens = {"L0.H4": "first token", "L1.H0": "separator", "L1.H3": ""}
    assert rows["token"].to_dict() == tokens
    assert rows.loc["L0.H4", "attention"] == pytest.approx(1.0, abs=1e-3)
    assert rows.loc["L0.H4", "carries"] == ""  # without an output projection
    assert rows.loc["L1.H3", "evenness"] == pytest.approx(1.0, abs=1e-4)
    assert encoder.of("L0.H4") == []
    assert str(encoder) == (
        "6 heads have 6 roles. Apart from roles: 2 heads are sinks; 1 head attends diffusely"
    )
    assert "sink: 1.00 [1.00, 1.00] of its attention on the first token" in encoder.why("L0.H4")


def test_induction_in_an_encoder_is_nan_and_not_zero(encoder):
    rows = encoder.frame()
    rows = rows[rows["role"] == "prefix matching"]
    assert len(rows) == 10
    assert rows[["effect", "lift", "p_adj", "baseline"]].isna().all(axis=None)
    assert not rows["found"].any()


def test_exactly_the_planted_heads_of_a_decoder_are_found():
    model = Planted(DECODER, causal=True)
    roles = find_roles(model, TEXTS, tokenizer=TOKENIZER, evidence=QUICK)
    # No token follows the last one, so a decoder has no separator to attend to.
    assert found(roles) == truth(DECODER)
    assert shapes(roles) == {"L0.H1": "sink", "L0.H2": "diffuse"}


@pytest.mark.full
def test_an_agreement_head_is_found_but_no_nearest_subject_or_same_person_head():
    model = Planted([("agree", "even"), ("any", "offset -1")], causal=True)
    roles = find_roles(model, clauses(90), tokenizer=TOKENIZER, evidence=QUICK)
    assert found(roles) == {
        ("L0.H0", "head → nsubj"),
        ("L0.H0", "head → nsubj, apart"),
        ("L1.H1", "previous token"),
    }
    assert shapes(roles) == {"L0.H1": "diffuse"}
    row = roles.frame().set_index(["role", "name"]).loc[("head → nsubj", "L0.H0")]
    assert row["effect"] > 0.95
    # The nearest subject is right for one verb of two, the words without their order less often.
    assert row["null.class"] == pytest.approx(0.5, abs=0.1)
    assert row["null.shuffled"] < 0.7


@pytest.mark.parametrize(
    ("kind", "role"),
    [("translate", "translation → source"), ("translate back", "source → translation")],
)
def test_a_head_that_knows_translations_is_found_in_its_own_direction(kind, role):
    roles = find_roles(
        Planted([(kind, "even")], causal=False),
        translations(70),
        tokenizer=TOKENIZER,
        evidence=QUICK,
    )
    assert found(roles) == {("L0.H0", role)}
    row = roles.frame().set_index(["role", "name"]).loc[(role, "L0.H0")]
    assert np.isnan(row["null.shuffled"])  # the order of words makes no difference


@pytest.mark.full
def test_a_head_that_depends_on_words_alone_has_no_structural_role():
    def same_person(text):
        ones = [position for position, token in enumerate(text.ids) if token == IDS[SUBJECTS[0]]]
        return [(position, target) for position in ones for target in ones if position != target]

    model = Planted([("same", "any")], causal=False)
    roles = find_roles(
        model,
        clauses(70),
        tokenizer=TOKENIZER,
        relations={"same person": same_person},
        evidence=QUICK,
    )
    row = roles.frame().set_index(["role", "name"]).loc[("same person", "L0.H0")]
    assert row["effect"] == pytest.approx(1.0, abs=0.01)
    assert row["null.shuffled"] == pytest.approx(1.0, abs=0.01)
    outcome = roles.outcomes().set_index("role").loc["same person"]
    assert outcome[["outcome", "nearest"]].tolist() == ["not found", "L0.H0"]
    assert outcome["null"] == "the same words in another order"
    assert "not same person: 1.000 against 1.000" in roles.why("L0.H0")
    # Examples, whose words are not shuffled, would contradict that; the result says so.
    note = "only the same words in another order stand against L0.H0; p without that null"
    assert note in str(roles.notes)
    assert (row["null"], row["found"]) == ("the same words in another order", False)


@pytest.mark.full
def test_a_model_that_knows_one_period_has_no_induction():
    model = Planted([("offset -9",)], causal=True)
    rng = np.random.default_rng(0)
    ids = [int(token) for token in np.tile(rng.choice(np.arange(6, 46), 10, replace=False), 4)]
    pairs = [
        (position, key + 1) for position in range(40) for key in range(position % 10, position, 10)
    ]
    one_period = Item(
        tuple(ids),
        {"token": [(position,) for position in range(40)]},
        {PREFIX_MATCHING.name: pairs},
    )
    scores = Evaluator([one_period], PROBED).scores(model)
    column = PROBED.index(PREFIX_MATCHING)
    assert scores.value[0, column, 0] / scores.count[0, column, 0] > 0.95  # explained by it
    assert found(find_roles(model, TEXTS, tokenizer=TOKENIZER, evidence=QUICK)) == set()


def random_model(seed):
    torch.manual_seed(seed)
    grammar = Grammar()
    config = MiniGPTConfig(len(grammar.vocabulary), n_layers=2, n_heads=4, d_model=32)
    return MiniGPT(config), make_tokenizer(grammar.vocabulary)


@pytest.mark.full
def test_random_models_have_no_roles():
    grammar, rng = Grammar(), np.random.default_rng(0)
    corpus = [annotate(grammar.sentence(rng)) for _ in range(80)]
    models = map(random_model, range(20))
    false = [
        bool(found(find_roles(model, corpus, tokenizer=tokenizer, evidence=Evidence(seed=seed))))
        for seed, (model, tokenizer) in enumerate(models)
    ]
    assert sum(false) <= 1  # 5 % of 20


class Nearest(torch.nn.Module):
    """A head that attends to the latest of some tokens, itself included."""

    def __init__(self, vocabulary, targets):
        super().__init__()
        self.config = SimpleNamespace(context=64)
        self.wanted = torch.nn.Parameter(torch.zeros(vocabulary, 1))
        self.wanted.data[targets] = 1.0

    def forward(self, input_ids, attention_mask):
        is_target = self.wanted[input_ids][:, None]
        keys = is_target * (SHARP + SHARP * torch.arange(input_ids.shape[1])[:, None])
        mask = attention_mask.bool()[:, None, None] & torch.ones(len(input_ids[0]), 1).bool()
        mask = mask & torch.ones(mask.shape[-1], mask.shape[-1]).bool().tril()
        return torch.nn.functional.scaled_dot_product_attention(
            torch.ones_like(keys), keys, keys, attn_mask=mask, scale=1.0
        )


@pytest.mark.full
def test_a_nearest_pronoun_head_is_no_subject_head():
    grammar, rng = Grammar(), np.random.default_rng(0)
    corpus = [annotate(grammar.sentence(rng)) for _ in range(100)]
    tokenizer = make_tokenizer(grammar.vocabulary)
    ids = tokenizer.get_vocab()
    pronouns = [ids[word] for word in (*PRONOUNS, *PRONOUNS.values())]
    roles = find_roles(Nearest(len(ids), pronouns), corpus, tokenizer=tokenizer, evidence=QUICK)
    row = roles.frame().set_index("role").loc["next subject"]
    assert (row["effect"], row["null"]) == (1.0, "nearest PRON to the left or itself")
    assert found(roles) == set()


@pytest.mark.full
def test_a_head_that_seeks_a_set_of_classes_has_no_syntactic_role():
    rng = np.random.default_rng(0)
    tag_of = {word: "NOUN" if n < 6 else "PROPN" if n < 12 else "X" for n, word in enumerate(WORDS)}
    corpus = []
    for line in dict.fromkeys(lines(120)):
        words = [word for word in line.split() if word in tag_of]
        starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
        tags = [tag_of[word] for word in words]
        nouns = [[n for n in range(word) if tags[n] != "X"] for word in range(len(words))]
        # Mostly the nearest noun of either class, sometimes the one before it.
        arcs = [
            Arc(word, before[-1 if rng.random() < 0.8 else -2], "obj")
            for word, before in enumerate(nouns)
            if tags[word] == "X" and len(before) > 1
        ]
        spans = tuple((s, s + len(word)) for s, word in zip(starts, words, strict=False))
        corpus.append(AnnotatedText(" ".join(words), spans, tuple(tags), tuple(arcs)))
    nouns = [IDS[word] for word, tag in tag_of.items() if tag != "X"]
    roles = find_roles(Nearest(len(IDS), nouns), corpus, tokenizer=TOKENIZER, evidence=QUICK)
    row = roles.frame().set_index("role").loc["obj → head"]
    assert row["null"] == "nearest NOUN/PROPN to the left"
    assert row["effect"] == pytest.approx(row["baseline"])
    assert row["null.class"] < row["effect"] - 0.03  # one class does not explain it
    assert row["outcome"] == "not found"
    assert found(roles) == {("L0.H0", "self")}  # of the nouns themselves


TESTED = {"ci_low": 0.0, "ci_high": 1.0, "null": "chance", "n": 99, "texts": 40, "p_adj": 0.001}


@pytest.mark.parametrize(
    ("points", "baseline", "second_half", "effect", "has"),
    [
        (0.0, 0.10, 0.50, 0.50, True),
        (0.0, 0.10, 0.30, 0.50, False),  # right on this half alone
        (0.0, 0.10, 0.50, 0.30, False),
        (0.1, 0.90, 0.95, 0.95, False),  # half of the gap, and five points
        (0.1, 0.80, 0.95, 0.95, True),
    ],
)
def test_a_head_chosen_on_one_half_is_tested_on_the_other(
    points, baseline, second_half, effect, has
):
    role = replace(PROBED[0], points=points)
    lift = (effect - baseline) / (1 - baseline)
    tested = TESTED | {"effect": effect, "baseline": baseline, "lift": lift}
    tested |= {f"null.{name}": baseline for name in NULLS}
    family = Hypotheses(
        *np.ones((2, 1, 1, 1)),
        {},
        roles=(role,),
        null_names={name: [name] for name in NULLS},
        measures={"chosen_half": np.array([[second_half]])}
        | dict.fromkeys(("mass", "value"), np.ones((1, 1))),
    )
    rows = evidence_rows([Head("", 0, 0)], family, pd.DataFrame([tested]), TEXT)
    assert rows["found"].tolist() == [has]


def test_a_text_annotated_twice_counts_once():
    bare = TEXTS[0]
    trees = [AnnotatedText(bare, ((0, 2),), tags=(tag,)) for tag in "XY"]
    roles = find_roles(
        Planted([("offset -1",)], causal=True),
        iter([bare, *trees, bare, TEXTS[1]]),
        tokenizer=TOKENIZER,
        evidence=Evidence(()),
    )
    assert roles.notes[0].startswith("2 distinct texts of 5;")


def test_the_encoder_of_an_encoder_decoder_is_evaluated_alone():
    with torch.random.fork_rng():
        encoder = tiny_t5(vocab_size=len(IDS), num_layers=1).get_encoder()
    roles = find_roles(encoder, TEXTS[:4], tokenizer=TOKENIZER, evidence=Evidence(()))
    assert set(roles.frame()["name"]) == {f"L0.H{head}" for head in range(4)}


def test_names_of_roles_are_escaped():
    roles = find_roles(
        Planted([("offset -1",)], causal=True),
        TEXTS[:4],
        tokenizer=TOKENIZER,
        relations={"a\x1b[31m": lambda text: [(2, 1)]},
        evidence=Evidence(()),
    )
    assert roles.why("L0.H0").replace("\n", "").isprintable()


@pytest.mark.full
def test_relations_drawn_at_random_are_no_roles(encoder):
    def at_random(seed):
        def pairs(text):
            rng = np.random.default_rng([seed, *text.ids])
            inside = [position for position, special in enumerate(text.special) if not special]
            return [(position, int(rng.choice(inside))) for position in inside]

        return pairs

    model = Planted(ENCODER, causal=False, order=by_frequency(TEXTS))
    relations = {f"shuffle {seed}": at_random(seed) for seed in range(20)}
    roles = find_roles(model, TEXTS, tokenizer=TOKENIZER, relations=relations)
    assert found(roles) == truth(ENCODER)


def test_too_few_texts_are_reported_as_not_tested():
    roles = find_roles(
        Planted([("offset -1",)], causal=True), TEXTS[:50], tokenizer=TOKENIZER, evidence=QUICK
    )
    assert found(roles) == set()
    assert any("25 held-out texts, not 30" in note for note in roles.notes)
    row = roles.frame().set_index("role").loc["previous token"]
    assert (row["effect"], row["texts"]) == (1.0, 25)
    assert np.isnan(row["p_adj"])
    assert row["outcome"] == "not tested: 25 held-out texts, 30 needed"
    why = roles.why("L0.H0")
    assert re.search(r"no role found among 2 tested; \d+ not tested: at most 25 held-out te", why)
    assert str(roles).startswith("0 heads have 0 roles: no role found among 2 tested; ")


def test_a_single_text_is_reported_as_not_tested():
    model = Planted([("offset -1",)], causal=True)
    few = " ".join(TEXTS[0].split()[:3] * 4)  # and too few different tokens for repeated sequences
    roles = find_roles(model, few, tokenizer=TOKENIZER, evidence=QUICK)
    message = "not tested: 1 held-out text, 30 needed"
    outcomes = set(roles.frame()["outcome"])
    assert outcomes == {message, "not tested: no held-out text has a query for it"}
    assert roles.none_found() == roles.none_found_by_head()["L0.H0"] == message
    assert f"\n  {message}\n" in roles.why("L0.H0")
    assert "no role found" not in roles.why("L0.H0")
    assert str(roles) == f"0 heads have 0 roles: {message}"


def test_each_test_has_an_outcome(encoder):
    rows = encoder.frame()
    tested = rows["p_adj"].notna()
    assert (rows["found"] == (rows["outcome"] == "found")).all()
    by_head = encoder.none_found_by_head()
    without = set(rows["name"]) - set(encoder.found()["name"])
    assert all(f"\n  {by_head[name]}\n" in f"{encoder.why(name)}\n" for name in without)
    assert by_head.keys() == set(rows["name"])
    assert set(rows["outcome"][tested]) == {"found", "not found"}
    assert rows["outcome"][~tested].str.startswith("not tested: ").all()
    assert not rows["found"][~tested].any()


def test_why_and_examples_show_the_evidence(encoder):
    why = encoder.why("L0.H3")
    assert why.startswith("L0.H3\n  offset -3, strongly: a token → 3 tokens before it\n    1.000 [")
    assert re.search(r"adjusted p [\d.]+e-\d\d", why)
    assert "no role found" in encoder.why("L1.H4")
    examples = encoder.examples("L0.H3")
    assert set(examples["text"]) <= set(TEXTS)
    assert set(examples["role"]) == {"offset -3"}
    assert encoder.of("L1.H4") == []


@pytest.mark.full
def test_the_same_seed_finds_the_same():
    model = Planted([("offset -1", "even")], causal=True)
    first, second = (
        find_roles(model, TEXTS, tokenizer=TOKENIZER, evidence=Evidence(seed=4)) for _ in range(2)
    )
    pd.testing.assert_frame_equal(first.frame(), second.frame())


def test_long_texts_are_cut_and_count_once():
    # A planted model has 48 positions.
    joined = [" ".join(TEXTS[start : start + 4]) for start in range(0, 88, 4)]
    model = Planted([("offset -1",)], causal=True)
    roles = find_roles(model, joined, tokenizer=TOKENIZER, max_tokens=48, evidence=Evidence(()))
    row = roles.frame().set_index("role").loc["previous token"]
    assert (row["effect"], row["texts"]) == (1.0, 11)
    assert any("22 texts were longer" in note for note in roles.notes)


def test_a_map_of_roles_has_the_letter_or_sign_of_each_head_and_counts_them(encoder: Roles) -> None:
    ax = encoder.plot()
    strongest = encoder.found().drop_duplicates("name").set_index("name")["role"]
    shapes = encoder.shapes().set_index("name")["shape"]
    unlabelled = shapes[~shapes.index.isin(strongest.index)]
    meanings = pd.concat([strongest, unlabelled.where(unlabelled == "diffuse", "sink")])
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    letters = {}
    for line in legend:
        letter, meaning, count = re.fullmatch(r"(.)  (.*), (\d+)", line).groups()
        assert int(count) == (meanings == meaning).sum() > 0
        letters[meaning] = letter
    drawn = {tuple(map(int, text.get_position())): text.get_text() for text in ax.texts}
    for name in dict.fromkeys(encoder.rows["name"]):
        head = Head.parse(name)
        assert drawn[head.head, head.layer] == letters.get(meanings.get(name), "")
    plt.close(ax.figure)
