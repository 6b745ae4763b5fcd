"""A choice among candidates is scored as defined, in one direction, against rules that choose."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.cli._roles import print_outcomes
from headwise.kernels import HeadBlock
from headwise.report.page import render
from headwise.report.page._role_table import role_table
from headwise.roles import Evidence, find_roles
from headwise.roles.relations import Item, Role, as_item, gold_roles, tokenize
from headwise.roles.scores import OFFSETS, Evaluator, heuristic_names
from headwise.roles.scores._eligible import EligiblePairs, Nodes, RelationIndex
from headwise.roles.scores._heuristics import heuristic_sums
from planted import TOKENIZER, Planted, pronouns
from studies import make_study
from tiers import tiers

seeds = st.integers(0, 2**32 - 1)
FORWARD, BACK = "pronoun → antecedent", "antecedent → pronoun"
CHOICES = (FORWARD, BACK, "mention → antecedent", "antecedent → mention")

QUICK = Evidence(models=1, splits=1)


def found(roles):
    rows = roles.found()
    return set(zip(rows["name"], rows["role"], strict=True))


@pytest.mark.parametrize(("kind", "role"), tiers([("agree back", BACK)], [("agree", FORWARD)]))
def test_a_head_is_found_in_its_own_direction_alone(kind, role):
    model = Planted([(kind, "any", "even")], causal=False)
    roles = find_roles(model, pronouns(90), tokenizer=TOKENIZER, evidence=QUICK)
    assert ("L0.H0", role) in found(roles)
    # Queries of other words are even.
    assert {name for _, name in found(roles)} <= {role, "diffuse"}
    outcomes = roles.outcomes().set_index("role")
    assert outcomes.loc[role, ["outcome", "nearest", "heads"]].tolist() == ["found", "L0.H0", 1]
    other = BACK if role == FORWARD else FORWARD
    assert outcomes.loc[other, "outcome"] == "not found"


@pytest.mark.full
def test_a_head_that_looks_to_the_nearest_name_does_not_find_the_antecedent():
    # Both persons are sought, so the recency that "agree" adds decides.
    model = Planted([("agree",)], causal=True)
    weights = model.attention[0].q.data
    token = model.blocks["token"].start
    weights[0, :, token] = weights[0, :, token + 1] = weights[0, :, [token, token + 1]].amax(-1)
    # With these texts no other null is by chance better than the rule that the head follows.
    roles = find_roles(model, pronouns(90, seed=4), tokenizer=TOKENIZER, evidence=QUICK)
    row = roles.frame().set_index("role").loc[FORWARD]
    assert row["null"] in ("nearest candidate", "candidate -1")
    assert row["baseline"] == pytest.approx(row["effect"])
    assert not row["found"]
    assert not found(roles)


UNDECIDED = "not tested: no held-out text has both a right and a wrong candidate"


@pytest.fixture(scope="module")
def undecided():
    model = Planted([("agree", "agree back")], causal=False)
    return find_roles(model, pronouns(90, both_right=True), tokenizer=TOKENIZER, evidence=QUICK)


@pytest.mark.full
def test_texts_that_cannot_decide_are_not_tested(undecided):
    rows = undecided.frame().set_index("role").loc[[FORWARD, BACK]]
    message = f"{UNDECIDED} for it"
    assert set(rows["outcome"]) == {message}
    assert rows[["effect", "p_adj", "smallest"]].isna().all(axis=None)
    assert set(undecided.outcomes().set_index("role").loc[[FORWARD, BACK], "outcome"]) == {message}


def test_every_view_names_the_choices_that_texts_cannot_decide(undecided, capsys):
    none = undecided.none_found()
    assert re.fullmatch(rf"no role found among \d+ tested; {len(CHOICES)} {UNDECIDED}", none)
    assert none in str(undecided)
    assert f"\n  {none}\n" in undecided.why("L0.H0")
    outcomes = {row["role"]: row["outcome"] for row in role_table(undecided)["outcomes"]}
    study = make_study(1, 1)
    study = study.with_roles(replace(undecided, model=study.table.model))
    page = " ".join(render(study).split())
    assert re.search(rf">{len(CHOICES)}</a> of \d+ roles could not be tested on these texts", page)
    print_outcomes(undecided)
    printed = capsys.readouterr().out
    for role in CHOICES:
        assert f"\n  {role}: {UNDECIDED} for it" in undecided.why("L0.H0")
        assert outcomes[role] == f"{UNDECIDED} for it"
        assert re.search(rf"{role} .*{UNDECIDED} for it", printed)
        shown = rf'<th scope="row">{role}</th> <td[^>]*><bdi>{UNDECIDED} for it</bdi>'
        assert re.search(shown, page)


def test_a_causal_model_cannot_attend_from_a_name_to_a_later_pronoun():
    roles = find_roles(
        Planted([("agree back",)], causal=True),
        pronouns(70),
        tokenizer=TOKENIZER,
        evidence=Evidence(()),
    )
    assert roles.frame().set_index("role").loc[BACK, "outcome"].startswith("not tested: ")


def drawn_item(rng, n_units):
    """Mentions of one or two tokens, in any order, some of them missing or overlapping."""
    starts = rng.integers(0, 14, n_units)
    nodes = [
        () if rng.random() < 0.1 else tuple(range(s, s + int(rng.integers(1, 3)))) for s in starts
    ]
    pairs = list(product(range(n_units), repeat=2))
    chosen = [pairs[i] for i in rng.permutation(len(pairs))[: int(rng.integers(1, 8))]]
    right = [pair for pair in chosen if rng.random() < 0.5]
    return Item(
        tuple(range(16)), {"mention": nodes}, {"r": sorted(right)}, candidates={"r": sorted(chosen)}
    )


@given(seeds, st.booleans(), st.booleans())
def test_a_choice_equals_its_definition(seed, incoming, causal):
    rng = np.random.default_rng(seed)
    items = [drawn_item(rng, int(rng.integers(2, 6))) for _ in range(2)]
    role = Role(
        "r", "", lambda text: (), "mention", score="choice", candidates=tuple, incoming=incoming
    )
    visible = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    weights = torch.tensor(rng.integers(1, 4, (2, 1, 16, 16))).float() * visible
    weights /= weights.sum(-1, keepdim=True)
    nodes = Nodes("mention", items, 16)
    eligible = EligiblePairs(RelationIndex(nodes, [role]), visible)
    block = HeadBlock(slice(0, 1), weights.clone(), torch.zeros(2, 1, 16))
    value = eligible.value(block, {})
    folded, seen = nodes.fold(weights)[:, 0], nodes.fold(visible.float())[:, 0] > 0
    for text, item in enumerate(items):
        expected = [0.0, 0, 0.0]
        for query in range(len(item.nodes["mention"])):
            options = []
            for q, candidate in item.candidates["r"]:
                ends = (candidate, query) if incoming else (query, candidate)
                tokens = [set(item.nodes["mention"][unit]) for unit in ends]
                if q == query and all(tokens) and not tokens[0] & tokens[1] and seen[text][ends]:
                    is_right = (query, candidate) in item.pairs["r"]
                    options.append((folded[text][ends].item(), is_right))
            if len({is_right for _, is_right in options}) < 2:
                continue
            best = max(weight for weight, _ in options)
            tied = [is_right for weight, is_right in options if weight >= best * (1 - 1e-6)]
            expected[0] += np.mean(tied)
            expected[1] += 1
            expected[2] += np.mean([is_right for _, is_right in options])
        measured = [value[text], eligible.count[text], eligible.uniform[text]]
        np.testing.assert_allclose([x.item() for x in measured], expected, atol=1e-5)


def rules(nodes, query, right, mentions=(), text=""):
    """What each rule scores for a query whose candidates are all other mentions."""
    candidates = [(query, other) for other in range(len(nodes)) if other != query]
    item = Item(
        tuple(range(20)),
        {"mention": nodes},
        {"r": [(query, right)]},
        candidates={"r": candidates},
        mentions=mentions,
        text=text,
    )
    role = Role("r", "", lambda text: (), "mention", score="choice", candidates=tuple)
    eligible = EligiblePairs(
        RelationIndex(Nodes("mention", [item], 20), [role]),
        torch.ones(1, 1, 20, 20, dtype=torch.bool),
    )
    return dict(zip(heuristic_names("mention"), heuristic_sums(eligible)[0].tolist(), strict=True))


def test_rules_that_choose_by_hand():
    nodes = [(10,), (2, 3), (5,), (13,), (8,)]  # the query first; the others out of order
    mentions = ("he", "Ann Lee", "Bo", "Caroline", "Al")
    text = "Ann Lee saw Bo ; Bo and Al told him that he met Caroline"
    by_right = [rules(nodes, 0, right, mentions, text) for right in range(1, 5)]

    def right_for(name):
        return [scores[name] for scores in by_right]

    assert right_for("nearest candidate") == [0, 0, 0, 1]
    assert right_for("first candidate") == [1, 0, 0, 0]
    assert right_for("longest candidate") == [0, 0, 1, 0]
    assert right_for("most repeated candidate") == [0, 1, 0, 0]
    assert right_for("candidate -1") == [0, 0, 0, 1]
    assert right_for("candidate -2") == [0, 1, 0, 0]
    assert right_for("candidate -3") == [1, 0, 0, 0]
    assert right_for("candidate +1") == [0, 0, 1, 0]
    assert right_for("candidate +2") == [0.25] * 4  # there is none: any of the four
    assert len(by_right[0]) == len(OFFSETS) + 4


def test_the_mass_of_a_choice_is_the_attention_in_its_direction():
    texts = pronouns(5)
    pieces = tokenize(TOKENIZER, texts, 40).pieces
    roles = gold_roles(pieces)
    items = [as_item(piece, roles) for piece in pieces]
    model = Planted([("agree", "agree back")], causal=False)
    scores = Evaluator(items, roles).scores(model, detailed=True)
    assert [role.name for role in roles] == [FORWARD, BACK]
    share = scores.masses["mass"].sum(0) / scores.count[..., :2].sum(0)
    np.testing.assert_allclose(np.diag(share), 1.0, atol=0.02)
    assert share[0, 1] < 0.5
    assert share[1, 0] < 0.5
