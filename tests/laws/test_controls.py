"""What a test could have shown: planted heads are found, and power is what is stated."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headwise.corpora import AnnotatedText, Arc, list_corpus
from headwise.kernels import HeadBlock
from headwise.roles import Evidence, _rows, find_roles
from headwise.roles._samples import Split
from headwise.roles._summaries import shortfall
from headwise.roles.evidence import (
    FEWEST_TEXTS,
    LEVEL,
    NULLS,
    POWER,
    Hypotheses,
    has_role,
    least_lift,
    plant,
    run_tests,
)
from headwise.roles.relations import LEVELS, Role, as_item, gold_roles, token_roles, tokenize
from headwise.roles.scores import Evaluator, RoleScores
from headwise.roles.scores._eligible import EligiblePairs, Nodes, RelationIndex
from headwise.tables import Head, halves
from planted import TOKENIZER, Planted, clauses, lines, pronouns

NULL = 0.4
ROLE = Role("r", "", lambda text: (), "word", bar=0.1, points=0.1)


def hits(rng, count, rate, spread):
    """The right queries of each text, whose own rates are around `rate`."""
    if not 0 < rate < 1:
        return count * rate
    own = rng.beta(spread * rate, spread * (1 - rate), len(count))
    return rng.binomial(count.astype(int), own).astype(float)


def simulated(rng, texts, heads, rate, spread=6.0, null=NULL):
    """Scores of heads with one true rate, a null that is right as often as stated, and a split."""
    count = rng.integers(1, 4, texts).astype(float)
    value = np.stack([hits(rng, count, rate, spread) for _ in range(heads)], -1)[:, None]
    of_null = hits(rng, count, null, spread)[:, None]
    alone = count[:, None, None].astype(np.float32)
    scores = RoleScores(
        heads=tuple(Head("", 0, head) for head in range(heads)),
        value=np.concatenate([value.astype(np.float32), alone], -1),  # the planted head is last
        count=np.repeat(alone, heads + 1, -1),
        uniform=np.repeat(alone, heads + 1, -1) / 10,
    )
    split = Split(np.arange(texts), halves(texts, 0))
    held = ~split.selection
    own = scores.value[..., :heads], scores.count[..., :heads]
    (selected, _), (total, _) = map(split.halves, own)
    family = Hypotheses(
        value=own[0][held],
        count=own[1][held],
        nulls={"offset": np.repeat(of_null[held, None], heads, -1).astype(np.float32)},
        roles=(ROLE,),
        null_names={"offset": ["offset -1"]},
        measures={"chosen_half": selected.sum(0) / total.sum(0)},
    )
    return family, scores, split


def smallest_in(planted):
    """The smallest effect that the test of the only role finds."""
    return planted.measures["smallest"][0, 0]


@pytest.mark.parametrize(("texts", "spread"), [(120, 6.0), (240, 2.0), (400, 50.0)])
def test_effects_of_the_stated_size_are_labeled_most_of_the_time(texts, spread):
    shares, sizes = [], []
    for seed in range(8):
        rng = np.random.default_rng([seed, texts])
        planted = plant(*simulated(rng, texts, 12, 0.5, spread), tests=30)
        sizes.append(smallest_in(planted))
        rng = np.random.default_rng([seed, texts])
        family, *_ = simulated(rng, texts, 30, smallest_in(planted), spread)
        (tested,) = run_tests([family], seed=seed)
        shares.append(has_role(family, tested).mean())
    assert np.mean(shares) > POWER - 0.1
    assert NULL + 0.1 < np.mean(sizes) < 0.95
    # Half of the distance to the null is labeled rarely: the size is not merely a safe one.
    family, *_ = simulated(rng, texts, 30, (smallest_in(planted) + NULL) / 2, spread)
    (tested,) = run_tests([family], seed=0)
    assert has_role(family, tested).mean() < 0.5


def test_more_texts_show_smaller_effects():
    sizes = [
        smallest_in(plant(*simulated(np.random.default_rng(0), texts, 12, 0.5), tests=500))
        for texts in (80, 160, 640, 2560)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] - 0.1
    too_few = simulated(np.random.default_rng(0), 2 * FEWEST_TEXTS - 2, 12, 0.5)
    assert np.isnan(smallest_in(plant(*too_few, tests=1)))  # with as few texts nothing is tested


def test_a_planted_head_is_diluted_and_joins_its_role():
    family, scores, split = simulated(np.random.default_rng(1), 400, 3, 0.5)
    planted = plant(family, scores, split, tests=3)
    assert planted.value.shape == (200, 1, 4)
    np.testing.assert_array_equal(planted.value[..., :3], family.value)
    baseline = family.nulls["offset"].sum() / family.count.sum()
    least = 0.1 / (1 - baseline)
    effect = baseline + (1 + least) / 2 * (1 - baseline)
    assert planted.measures["planted_effect"][0, 0] == pytest.approx(effect, abs=1e-6)
    shown = planted.value[..., 3].sum() / planted.count[..., 3].sum()
    assert shown == pytest.approx(effect, abs=0.06)
    assert planted.measures["chosen_half"][0, 3] == pytest.approx(effect, abs=0.06)


@pytest.mark.parametrize(
    ("bar", "points", "baseline", "least"),
    [(0.25, 0.0, 0.9, 0.25), (0.1, 0.1, 0.5, 0.2), (0.1, 0.1, 0.95, 2.0), (0.25, 0.0, 1.0, np.inf)],
)
def test_the_least_lift_that_the_bars_allow(bar, points, baseline, least):
    role = replace(ROLE, bar=bar, points=points)
    assert least_lift([role], np.array([baseline]))[0] == pytest.approx(least)


def test_nothing_is_labeled_above_a_null_that_leaves_no_room():
    for null in (0.95, 1.0):
        drawn = simulated(np.random.default_rng(2), 300, 3, 1.0, null=null)
        planted = plant(*drawn, tests=3)
        assert np.isnan(smallest_in(planted))
        assert planted.measures["planted_effect"][0, 0] > 1


def complete(family):
    """The family with a column for every null and measure, so that it has rows."""
    unknown = np.full(family.value.shape[1:], np.nan)
    return replace(
        family,
        nulls=dict.fromkeys(NULLS, np.full_like(family.value, np.nan)) | dict(family.nulls),
        null_names={name: [""] for name in NULLS} | dict(family.null_names),
        measures=family.measures | {"mass": unknown, "value": unknown},
    )


@pytest.mark.parametrize(
    ("tests", "outcome"),
    [
        (30, "not found"),
        (10**9, "not tested: no score is labeled with a probability of 80% (offset -1 scores"),
    ],
)
def test_a_role_without_a_smallest_effect_is_not_tested(tests, outcome):
    family, scores, split = simulated(np.random.default_rng(1), 120, 3, 0.5, null=0.75)
    planted = plant(complete(family), scores, split, tests=tests)
    (tested,) = run_tests([planted])
    assert has_role(planted, tested).tolist() == [False, False, False, True]
    rows = _rows.tested_rows(scores.heads, planted, tested, _rows.TEXT)
    assert rows["outcome"].str.startswith(outcome).all()
    assert rows["smallest"].isna().all() == rows["p_adj"].isna().all() == (tests > 30)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("of_contrast", [0.0, 0.7, 0.93])
def test_no_smallest_effect_is_contradicted(seed, of_contrast):
    """It clears the bar over the head's own nulls, and no larger one was not found.

    The last head scores without the relation what the contrast says; the planted head does not.
    """
    rng = np.random.default_rng(seed)
    family, scores, split = simulated(rng, 120, 4, 0.97)
    contrast = np.zeros_like(family.value)
    contrast[..., -1] = hits(rng, family.count[:, 0, -1], of_contrast, 6.0)[:, None]
    family = complete(replace(family, nulls={**family.nulls, "shuffled": contrast}))
    planted = plant(family, scores, split, tests=200)
    (tested,) = run_tests([planted])
    rows = _rows.tested_rows(scores.heads, planted, tested, _rows.TEXT)
    assert rows["outcome"].isin(("found", "not found")).all()
    smallest, baseline = rows["smallest"].to_numpy(), rows["baseline"].to_numpy()
    bar = baseline + least_lift([ROLE], baseline) * (1 - baseline)
    assert not (smallest < bar - 1 / 400).any()
    assert not ((rows["outcome"] == "not found") & (rows["effect"] >= smallest)).any()
    assert smallest[0] == smallest[1] == smallest_in(planted)  # of those without such a null
    if of_contrast == 0.7:
        assert smallest[-1] > smallest[0]
    missed = rows[rows["outcome"] == "not found"].to_dict("records")
    assert all("fails by p" in shortfall(row) for row in missed if LEVEL <= row["p_adj"] < 1)


def test_no_head_has_a_role_whose_planted_head_is_not_found():
    # 30 held-out texts: heads that are always right pass, the diluted planted head does not.
    family, scores, split = simulated(np.random.default_rng(5), 60, 3, 1.0, null=0.7)
    planted = plant(complete(family), scores, split, tests=3)
    (tested,) = run_tests([planted])
    assert has_role(planted, tested).tolist() == [True, True, True, False]
    rows = _rows.tested_rows(scores.heads, planted, tested, _rows.TEXT)
    assert not rows["found"].any()
    assert rows["outcome"].str.startswith("not tested: a planted head with 0.93 was not").all()
    assert smallest_in(planted) < 1  # which the test contradicts
    assert rows[["p_adj", "smallest"]].isna().all(axis=None)


@pytest.mark.parametrize(
    ("corpus", "causal"), [(clauses(6), True), (pronouns(6), False), (lines(8), True)]
)
def test_an_undiluted_planted_head_is_always_right(corpus, causal):
    pieces = tokenize(TOKENIZER, list_corpus("test", corpus), 60).pieces
    roles = [
        role for role in (*token_roles(pieces), *gold_roles(pieces)) if causal or not role.ahead
    ]
    items = [as_item(piece, roles) for piece in pieces]
    scores = Evaluator(items, roles).scores(Planted([("any",)], causal=causal), detailed=True)
    planted, count, even = (sums[..., -1] for sums in (scores.value, scores.count, scores.uniform))
    assert count.sum() > 0
    np.testing.assert_allclose(planted, count, atol=1e-3)
    assert (even <= planted + 1e-3).all()


@pytest.mark.parametrize(
    ("corpus", "causal"), [(clauses(5), True), (clauses(5), False), (pronouns(5), True)]
)
def test_planted_heads_score_what_the_definitions_for_all_heads_give(corpus, causal):
    pieces = tokenize(TOKENIZER, list_corpus("test", corpus), 60).pieces
    roles = [*token_roles(pieces), *gold_roles(pieces)]
    items = [as_item(piece, roles) for piece in pieces]
    scores = Evaluator(items, roles).scores(Planted([("any",)], causal=causal), detailed=True)
    expected = np.array([sum(planted_by_definition(item, roles, causal)) for item in items])
    assert {role.score for role in roles} >= {"top", "mass", "entropy"}
    assert (expected > 0).any(0).sum() > 5
    np.testing.assert_allclose(scores.value[..., -1], expected, atol=1e-3)


def planted_by_definition(item, roles, causal):
    """By level and role, the score of a whole head with the planted attention, in one text."""
    S = len(item.ids)
    visible = torch.ones(1, 1, S, S, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    for level in LEVELS:
        index = RelationIndex(Nodes(level, [item], S), roles)
        eligible = EligiblePairs(index, visible)
        scores = np.zeros(len(roles))
        for column, role in enumerate(roles):
            wanted = torch.zeros(S, S)
            query, *ends, _ = index.token_pairs
            pairs = tuple(tokens[index.role[query] == column] for tokens in ends)
            wanted[pairs] = 0.0 if role.kind == "breadth" else 1.0
            wanted *= visible[0, 0]
            wanted = torch.where(wanted.any(1, keepdim=True), wanted, visible[0, 0].float())
            weights = (wanted / wanted.sum(1, keepdim=True))[None, None]
            even = dict.fromkeys(("entropy", "content entropy"), torch.ones(1, 1, S))
            block = HeadBlock(slice(0, 1), weights, torch.zeros(1, 1, S))
            scores[column] = eligible.value(block, even)[column, 0]
        yield scores


@pytest.mark.full
def test_a_role_that_a_rule_explains_is_not_tested():
    corpus = []
    for line in dict.fromkeys(lines(80)):
        words = line.split()
        starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
        spans = tuple((s, s + len(word)) for s, word in zip(starts, words, strict=False))
        arcs = tuple(Arc(word, word - 1, "obj") for word in range(1, len(words), 2))
        corpus.append(AnnotatedText(line, spans, ("X",) * len(words), arcs))
    roles = find_roles(
        Planted([("offset -1", "even")], causal=True),
        corpus,
        tokenizer=TOKENIZER,
        evidence=Evidence(models=1, splits=1),
    )
    rows = roles.frame().set_index(["role", "name"]).loc["obj → head"]
    assert rows.loc["L0.H0", "effect"] == 1.0
    message = "not tested: offset -1 scores 1.00, too near 1 for a label"
    assert set(rows["outcome"]) == {message}
    assert rows["p_adj"].isna().all()
    assert roles.outcomes().set_index("role").loc["obj → head", "outcome"] == message
    assert f"obj → head: 1.000 against 1.000 of offset -1, {message}" in roles.why("L0.H0")
    assert "not tested: these texts could not have shown it" in roles.none_found_by_head()["L0.H1"]
