"""Name moving: attention to the name that has to follow, and an effect; on heads built by hand."""

from dataclasses import replace

import numpy as np
import pytest

from headwise.corpora import AnnotatedText, Mention, name_texts
from headwise.roles import Behaviour, Effects, Evidence, Roles, find_roles, name_moving
from headwise.roles._rows import labels_of_rows
from headwise.roles.relations import as_item, gold_roles, next_names, tokenize
from planted import CUE, MOVED, TOKENIZER, PlantedGPT

PATTERNS = (
    f"{{one}} w3 {{two}} w1 {{again}} {CUE} {{other}} .",
    f"w4 {{two}} w2 w5 {{one}} w6 {{again}} {CUE} {{other}} , w1",
)
TEXTS = name_texts(160, names=MOVED, patterns=PATTERNS)
LAYERS = (("before", "even"), ("move", "move unread", "move any", "even"))


@pytest.fixture(scope="module")
def model() -> PlantedGPT:
    return PlantedGPT(LAYERS)


@pytest.fixture(scope="module")
def task(model: PlantedGPT) -> Behaviour:
    return name_moving(model, TOKENIZER, TEXTS)


@pytest.fixture(scope="module")
def found(model: PlantedGPT) -> Roles:
    return find_roles(model, TOKENIZER, TEXTS, evidence=Evidence(("shuffled",)))


def test_two_names_come_in_either_order_and_the_one_that_does_not_repeat_follows() -> None:
    follows_first = []
    for text in name_texts(80):
        names = [text.text[mention.start : mention.end] for mention in text.mentions]
        one, two, again, other = names
        assert {one, two} == {again, other}
        assert len(set(names)) == 2
        assert [mention.entity for mention in text.mentions].count(text.mentions[3].entity) == 2
        follows_first.append(other == one)
    assert 0.3 < np.mean(follows_first) < 0.7
    assert name_texts(9, seed=1) == name_texts(9, seed=1) != name_texts(9, seed=2)


def test_only_a_name_that_competes_with_a_repeated_one_has_to_follow() -> None:
    def follows(entities: str, pronouns: str = "") -> list[int]:
        mentions = tuple(
            Mention(3 * n, 3 * n + 2, int(entity), pronoun=str(n) in pronouns)
            for n, entity in enumerate(entities)
        )
        text = " ".join(f"w{n}" for n in range(len(entities)))
        (piece,) = tokenize(TOKENIZER, [AnnotatedText(text, mentions=mentions)], 40).pieces
        return [name for name, _, _ in next_names(piece)]

    assert follows("0110") == [3]
    assert follows("01100") == [3]  # afterwards it repeats as well
    assert follows("011022") == [3, 5]
    assert follows("0101") == follows("0011") == [3]
    assert follows("0102") == follows("0120") == follows("000") == follows("00") == []
    assert follows("0110", pronouns="3") == follows("0110", pronouns="2") == []


def test_the_pairs_are_from_the_token_before_the_name_to_its_earlier_mention() -> None:
    spans = ((3, 1), (9, 3), (12, 3), (15, 1))
    mentions = tuple(Mention(start, start + 2, entity) for start, entity in spans)
    text = AnnotatedText("w9 w1 w2 w3 w3 w1", mentions=mentions)
    (piece,) = tokenize(TOKENIZER, [text], 40).pieces
    roles = [role for role in gold_roles([piece]) if role.name == "next name"]
    item = as_item(piece, roles)
    first, second, third, _, before = map(tuple, item.nodes["mention"])
    assert before == third  # the names are next to each other
    assert [item.pairs["next name"], item.candidates["next name"]] == [
        [(4, 0)],
        [(4, 0), (4, 1), (4, 2)],
    ]
    assert [piece.tokens[place] for (place,) in (first, second, third)] == ["w1", "w3", "w3"]


def test_a_head_that_chooses_the_name_has_the_role_before_any_effect(found: Roles) -> None:
    rows = found.found()
    assert set(rows.loc[rows["role"] == "next name", "name"]) == {"L1.H0", "L1.H1"}
    assert found.of("L1.H0") == found.of("L1.H1") == ["next name"]
    row = found.frame().set_index(["role", "name"]).loc["next name"]
    assert row.loc["L1.H2", "effect"] == pytest.approx(1 / 3, abs=0.02)  # of three names
    assert row.loc["L1.H0", "rule.nearest"] == 0.0  # it is the one that repeats
    assert row.loc["L1.H0", "rule.first"] == pytest.approx(0.5, abs=0.2)
    assert row.loc["L1.H0", "control"] > 0.5


def test_the_control_differs_in_the_last_name_alone(task: Behaviour) -> None:
    names = {TOKENIZER.get_vocab()[name] for name in MOVED}
    for batch, control in zip(task.batches, task.control, strict=True):
        rows = zip(batch.inputs["input_ids"], control.inputs["input_ids"], strict=True)
        for ids, other in rows:
            place = int((ids != other).nonzero())
            assert int(ids[place]) in ids[:place]
            assert int(other[place]) not in ids
            assert int(other[place]) in names


def test_moving_needs_attention_and_effect(
    model: PlantedGPT, task: Behaviour, found: Roles
) -> None:
    heads = ["L1.H0", "L1.H1", "L1.H2"]
    roles = found.effects(model, [task], heads=heads)
    assert roles.of("L1.H0") == ["name moving"]
    assert roles.of("L1.H1") == ["next name"]  # attends alike, and is never read
    assert roles.of("L1.H2") == []
    frame = roles.ablation_effects.frame().set_index("name")
    assert frame.loc["L1.H0", "effect"] > 1
    assert frame.loc["L1.H0", "control"] < 0.1 * frame.loc["L1.H0", "effect"]
    assert frame.loc["L1.H1", "effect"] == pytest.approx(0.0, abs=1e-6)
    assert (
        roles.frame().set_index(["role", "name"]).loc[("next name", "L1.H0"), "without.name moving"]
        > 1
    )
    assert "name moving, strongly" in roles.why("L1.H0")


def test_a_loss_on_the_control_as_well_earns_no_label(
    model: PlantedGPT, task: Behaviour, found: Roles
) -> None:
    unspecific = replace(task, control=task.batches)
    assert found.effects(model, [unspecific], heads=["L1.H0"]).of("L1.H0") == ["next name"]


@pytest.mark.parametrize(
    ("low", "high", "label"),
    [(0.2, 0.9, "name moving"), (-0.1, 0.9, "next name"), (-0.9, -0.2, "next name")],
)
def test_a_copying_score_above_zero_shows_the_effect_as_well(
    found: Roles, low: float, high: float, label: str
) -> None:
    rows = found.frame().query("role == 'next name' and name == 'L1.H0'")
    rows = rows.assign(**{"copying": 0.5, "copying.low": low, "copying.high": high})
    assert labels_of_rows(rows, Effects()) == [label]


def test_names_of_several_tokens_move(model: PlantedGPT) -> None:
    names = [f"{one} {two}" for one, two in zip(MOVED[::2], MOVED[1::2], strict=True)]
    texts = name_texts(120, names=names, patterns=PATTERNS)
    task = name_moving(model, TOKENIZER, texts)
    for batch, control in zip(task.batches, task.control, strict=True):
        assert ((batch.inputs["input_ids"] != control.inputs["input_ids"]).sum(1) == 2).all()
    roles = find_roles(model, TOKENIZER, texts, evidence=Evidence(()))
    assert roles.outcomes().set_index("role").loc["next name", "n"] > 20
