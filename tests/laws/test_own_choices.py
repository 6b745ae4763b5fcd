"""A choice of one's own: the score, the baselines and the outcome of the same annotated choice."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from command import headwise
from headwise.corpora import AnnotatedText
from headwise.errors import ArgumentError
from headwise.lab import MiniGPT, MiniGPTConfig, save
from headwise.roles import ChoiceRelation, Evidence, Roles, TokenText, find_roles, rules_of
from headwise.roles._nulls import NULLS
from headwise.roles._samples import digest_of_text, halves_of_texts
from headwise.roles._sentences import shortfall
from headwise.roles.relations import tokenize
from headwise.roles.scores import RULES
from planted import SUBJECTS, TOKENIZER, VERBS, Planted, pronouns

FORWARD, BACK = "pronoun → antecedent", "antecedent → pronoun"
WITHOUT_NULLS = Evidence(())
NOT_DECIDED = "not tested: no held-out text has both a right and a wrong candidate for it"


def names(text: TokenText) -> Any:
    """The pronoun of a text of `pronouns` with each of its four names, as phrases."""
    for query, word in enumerate(text.tokens):
        if word in VERBS:
            for key, other in enumerate(text.tokens):
                if other in SUBJECTS:
                    yield [query], range(key, key + 1)


def antecedent(text: TokenText) -> Any:
    """The pronoun with the latest name of its person, by the words alone."""
    (query,) = (place for place, word in enumerate(text.tokens) if word in VERBS)
    name = SUBJECTS[VERBS.index(text.tokens[query])]
    return [(query, max(place for place, word in enumerate(text.tokens) if word == name))]


CHOICE = ChoiceRelation(antecedent, names)


@pytest.fixture(scope="module")
def roles() -> Roles:
    """Annotated and own relations of the same choices, for heads of both directions."""
    relations = {"own": CHOICE, "own back": ChoiceRelation(antecedent, names, incoming=True)}
    model = Planted([("agree", "agree back", "even")], causal=False)
    return find_roles(model, TOKENIZER, pronouns(90), relations=relations)


@pytest.mark.parametrize(("own", "annotated"), [("own", FORWARD), ("own back", BACK)])
def test_an_own_choice_equals_the_annotated_one(roles: Roles, own: str, annotated: str) -> None:
    # What is drawn for a planted head, and p over a bootstrap, depend on the other hypotheses.
    frame = roles.frame().drop(columns=["role", "label", "p_adj", "control"])
    rows = [
        frame[roles.frame()["role"] == name].reset_index(drop=True) for name in (own, annotated)
    ]
    pd.testing.assert_frame_equal(*rows)
    assert rows[0]["found"].sum() == 1


def test_a_planted_head_that_chooses_is_found(roles: Roles) -> None:
    outcomes = roles.outcomes().set_index("role")
    assert outcomes.loc["own", ["outcome", "nearest", "heads"]].tolist() == ["found", "L0.H0", 1]
    assert outcomes.loc["own back", ["outcome", "nearest"]].tolist() == ["found", "L0.H1"]
    assert (outcomes.loc[["own", "own back"], "control"] > 0.5).all()


def test_a_head_that_picks_the_nearest_is_not_found() -> None:
    model = Planted([("agree",)], causal=True)
    weights = model.attention[0].q.data
    token = model.blocks["token"].start
    weights[0, :, token] = weights[0, :, token + 1] = weights[0, :, [token, token + 1]].amax(-1)
    texts = [text.text for text in pronouns(90, seed=4)]
    roles = find_roles(model, TOKENIZER, texts, relations={"own": CHOICE})
    row = roles.frame().set_index("role").loc["own"]
    assert row["null"] in ("nearest candidate", "candidate -1")
    assert row["effect"] == pytest.approx(row["rule.nearest"])
    assert not row["found"]


def row_of(roles: Roles, role: str) -> dict[str, Any]:
    """The row of the first head."""
    return roles.frame().set_index(["role", "name"]).loc[role, "L0.H0"].to_dict()


def test_every_rule_among_the_candidates_is_shown(roles: Roles) -> None:
    row = row_of(roles, "own")
    rules = rules_of(row)
    assert list(rules) == [*RULES, "best place"]
    held = _held_out_rates(roles)
    for rule, rate in held.items():
        assert rules[rule] == pytest.approx(rate, abs=1e-6)
    # The strongest rule of the selection half is the null.
    assert row["null.candidate"] in [rules[rule] for rule in RULES]
    assert rules["best place"] == row["null.offset"]
    assert not rules_of(row_of(roles, "self"))
    line = ", ".join(f"{rule} {rate:.3f}" for rule, rate in rules.items())
    assert f"\n    candidates: {line}\n" in roles.why("L0.H0")
    assert shortfall(row).endswith(f"; candidates: {line}")
    assert rules_of(roles.outcomes().set_index("role").loc["own"].to_dict()) == rules


def _held_out_rates(roles: Roles) -> dict[str, float]:
    """The nearest and the first name, scored on the held-out texts by their words alone."""
    texts = list(dict.fromkeys(text.text for text in pronouns(90)))
    selection = halves_of_texts([digest_of_text(text) for text in texts])
    hits: dict[str, list[bool]] = {"nearest": [], "first": []}
    for text, selected in zip(texts, selection, strict=True):
        if not selected:
            (piece,) = tokenize(TOKENIZER, [AnnotatedText(text)], 60).pieces
            ((query, right),) = antecedent(piece)
            keys = [place for place, word in enumerate(piece.tokens) if word in SUBJECTS]
            hits["nearest"].append(min(keys, key=lambda key: abs(key - query)) == right)
            hits["first"].append(keys[0] == right)
    return {rule: float(np.mean(each)) for rule, each in hits.items()}


def test_the_length_and_the_repetitions_of_a_phrase_are_those_of_its_characters() -> None:
    """The longest phrase is right in every text, and the most repeated one in every other."""

    def phrases(text: TokenText) -> list[tuple[int, list[int]]]:
        return [(8, [1, 2]), (8, [4]), (8, [6, 7, 7])]

    words = [f"w{one} w{two} , w3 . w11 w12" for one in range(4) for two in range(5, 20)]
    texts = [f"{text} w3" + " w3" * (n % 2) for n, text in enumerate(words)]
    relation = ChoiceRelation(lambda text: phrases(text)[2:], phrases)
    roles = find_roles(
        Planted([("any",)], True), TOKENIZER, texts, relations={"own": relation},
        evidence=WITHOUT_NULLS,
    )  # fmt: skip
    rules = rules_of(row_of(roles, "own"))
    assert rules["longest"] == rules["nearest"] == rules["best place"] == 1.0
    assert rules["first"] == rules["most repeated"] == 0.0


@pytest.mark.parametrize(
    ("pairs", "candidates"),
    [
        (lambda text: [(3, 1)], lambda text: [(3, 1)]),  # all right
        (lambda text: [], lambda text: [(3, 1), (3, 2)]),  # none right
        (lambda text: [], lambda text: []),
        (lambda text: [(3, []), ([], 1)], lambda text: []),  # phrases of another piece
        (lambda text: [(3, 3)], lambda text: [(3, 3), (3, 2)]),  # the query itself is no candidate
    ],
)
def test_candidates_that_leave_no_choice_are_not_tested(
    pairs: Callable[..., Any], candidates: Callable[..., Any]
) -> None:
    roles = find_roles(
        Planted([("any",)], True), TOKENIZER, [text.text for text in pronouns(60)],
        relations={"own": ChoiceRelation(pairs, candidates)}, evidence=WITHOUT_NULLS,
    )  # fmt: skip
    row = roles.outcomes().set_index("role").loc["own"]
    assert row["outcome"] == NOT_DECIDED
    assert np.isnan(row["smallest"])
    assert f"own: {NOT_DECIDED}" in roles.why("L0.H0")


def results_of(pairs: Any, candidates: Any) -> Roles:
    relation = ChoiceRelation(lambda text: pairs, lambda text: candidates)
    texts = [text.text for text in pronouns(4)]
    relations = {"own": relation}
    return find_roles(
        Planted([("any",)], True), TOKENIZER, texts, relations=relations, evidence=WITHOUT_NULLS
    )


def test_a_right_choice_that_is_no_candidate_is_refused() -> None:
    for candidates in ([], [(3, 2)], [(3, (1, 2))]):
        message = r"'own' gives the tokens \(\(3,\), \(1,\)\) as a right choice, and not as a cand"
        with pytest.raises(ArgumentError, match=message):
            results_of([(3, 1)], candidates)


@pytest.mark.parametrize("pairs", [[(1, 2, 3)], [("a", 1)], [1], None, [(0.5, 1)], [([0.5], 1)]])
def test_choices_that_are_no_pairs_are_named(pairs: Any) -> None:
    for right, candidates in ((pairs, []), ([], pairs)):
        with pytest.raises(ArgumentError, match=r"find_roles: 'own' returns .* Return pairs"):
            results_of(right, candidates)


def test_a_generator_of_choices_that_are_no_pairs_is_named() -> None:
    relation = ChoiceRelation(lambda text: (end for end in [("a", 1)]), names)
    with pytest.raises(ArgumentError, match=r"'own' returns \[\('a', 1\)\] .* Return pairs"):
        find_roles(
            Planted([("any",)], True), TOKENIZER, [text.text for text in pronouns(4)],
            relations={"own": relation}, evidence=WITHOUT_NULLS,
        )  # fmt: skip


def test_a_choice_outside_of_the_text_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'own' gives \(\(3,\), \(1, 99\)\) for a text of"):
        results_of([], [(3, (99, 1))])


def test_special_tokens_may_be_candidates_and_keep_their_places_in_another_order() -> None:
    def among(text: TokenText) -> list[tuple[int, int]]:
        last = len(text.ids) - 1
        return [(last - 1, 0), (last - 1, 2), (last, 1), (last, 0)]

    relation = ChoiceRelation(lambda text: among(text)[1:3], among)
    roles = find_roles(
        Planted([("any",)], True), TOKENIZER, [text.text for text in pronouns(60)],
        relations={"own": relation}, evidence=Evidence(("shuffled",)),
    )  # fmt: skip
    row = roles.frame().set_index("role").loc["own"]
    assert row["n"] == 2 * row["texts"]
    assert 0 <= row["null.shuffled"] <= 1


def own_effects(roles: Roles) -> pd.DataFrame:
    frame = roles.frame().set_index(["role", "name"])
    return frame.loc[["own", "own back"], ["effect", "rule.first", "null.candidate", "outcome"]]


OWN = """
from headwise.roles import ChoiceRelation

def among(text):
    return [(len(text.ids) - 2, key) for key in range(1, 4)]

def right(text):
    return among(text)[:1]

def broken(text):
    yield 1 / 0

def two(text, more):
    return []

first = ChoiceRelation(right, among)
fails = ChoiceRelation(right, broken)
takes_two = ChoiceRelation(two, among)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    config = MiniGPTConfig(len(TOKENIZER.get_vocab()), n_layers=1, n_heads=2, d_model=16)
    save(MiniGPT(config), TOKENIZER, folder / "model")
    (folder / "own.py").write_text(OWN, "utf-8")
    (folder / "texts.txt").write_text("\n\n".join(t.text for t in pronouns(70)), "utf-8")
    return folder


def run(files: Path, name: str, *more: str) -> Any:
    return headwise(
        "roles", files / "model", "--text", files / "texts.txt", "--nulls", "none",
        "--relation", f"{files / 'own.py'}:{name}", *more,
    )  # fmt: skip


def test_the_command_takes_a_choice_of_a_file(files: Path) -> None:
    done = run(files, "first", "--json")
    assert done.code == 0, done.err
    (row,) = (row for row in json.loads(done.out) if row["role"] == "first")
    assert row["rule.first"] == 1.0
    assert {f"rule.{rule}" for rule in RULES} | {f"null.{null}" for null in NULLS} <= row.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", r"fails\.candidates in .* fails \(ZeroDivisionError"),
        ("takes_two", r"takes_two\.pairs\(text, more\) in .* cannot be called with one argument"),
        ("second", r"no function second.* It has among, right, broken, two, first, fails, takes_t"),
    ],
)
def test_a_choice_of_a_file_that_fails_is_named(files: Path, name: str, message: str) -> None:
    done = run(files, name)
    assert (done.code, done.out) == (2, "")
    assert re.search(f"^--relation: .*{message}", done.err), done.err
