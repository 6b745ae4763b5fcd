"""The effects of ablation, on models built by hand with a known answer."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from headwise.corpora import AnnotatedText, Choice
from headwise.models import ablate
from headwise.roles import (
    Evidence,
    Roles,
    agreement,
    behaviour,
    find_roles,
    repetition,
    translation,
)
from headwise.tables import Head
from planted import IDS, TOKENIZER, WORDS, PlantedGPT, lines

TEXTS = lines(80)
ONE = (("before", "even"), ("induction", "even"))
TWO = (("before", "even"), ("induction", "induction", "induction unread"))
ALL = ["L0.H0", "L0.H1", "L1.H0", "L1.H1"]


def tried(layers, heads=None) -> Roles:
    model = PlantedGPT(layers)
    roles = find_roles(model, TOKENIZER, TEXTS, evidence=Evidence(nulls=()))
    return roles.effects(model, [repetition(model, TOKENIZER, TEXTS)], heads=heads)


@pytest.fixture(scope="module")
def roles() -> Roles:
    return tried(ONE, ALL)


@pytest.fixture(scope="module")
def model() -> PlantedGPT:
    return PlantedGPT(ONE)


@pytest.fixture(scope="module")
def two() -> Roles:
    return tried(TWO)


def effects(roles: Roles) -> pd.DataFrame:
    return roles.ablation_effects.frame().set_index("name")


def test_ablation_separates_heads_that_repetition_needs_from_others(roles: Roles) -> None:
    frame = effects(roles)
    guess = np.log(len(IDS))  # the next token is not predicted at all
    assert frame.loc[["L0.H0", "L1.H0"], "effect"].between(0.8 * guess, 1.5 * guess).all()
    assert (frame.loc[["L0.H0", "L1.H0"], "ci_low"] > 0).all()
    assert (frame.loc[["L0.H0", "L1.H0"], "p_adj"] < 0.05).all()
    assert (frame.loc[["L0.H1", "L1.H1"], "effect"].abs() < 1e-6).all()
    assert roles.ablation_effects.groups == ()


def test_effects_stand_beside_the_roles_that_the_behaviour_names(roles: Roles) -> None:
    rows = roles.frame().set_index(["name", "role"])
    costs, effect = rows["without.repetition"], effects(roles)["effect"]
    assert costs["L1.H0", "induction"] == effect["L1.H0"]
    assert costs["L0.H0", "previous token"] == effect["L0.H0"]
    assert np.isnan(costs["L1.H0", "first token"])
    ends = rows.loc[("L1.H0", "induction"), ["without.repetition.low", "without.repetition.high"]]
    assert ends.iloc[0] < costs["L1.H0", "induction"] < ends.iloc[1]


def test_a_head_with_a_role_may_have_no_effect(two: Roles) -> None:
    assert "induction" in two.of("L1.H2")  # it attends to the right token
    assert abs(effects(two).loc["L1.H2", "effect"]) < 1e-6  # but its output is never read


def test_two_copies_of_a_head_back_each_other_up(two: Roles) -> None:
    assert (effects(two).loc[["L1.H0", "L1.H1"], "effect"].abs() < 0.01).all()
    (group,) = two.ablation_effects.groups
    assert group.together.heads == (
        "L1.H0",
        "L1.H1",
    )  # the head whose output is never read is not part of it
    assert (group.role, group.together.behaviour) == ("induction", "repetition")
    assert group.together.low > 1.0 > 100 * abs(group.alone)
    assert "L1.H0 and L1.H1 (induction) back each other up" in two.why("L1.H0")
    assert "back each other up" not in two.why("L1.H2")


def test_an_effect_equals_mean_ablation_over_the_same_texts(
    model: PlantedGPT, roles: Roles
) -> None:
    task = repetition(model, TOKENIZER, TEXTS, sequences=40)
    effect = roles.effects(model, [task], heads=["L1.H0"]).ablation_effects.alone[0]
    reference = [batch.inputs for batch in task.batches]

    def losses() -> torch.Tensor:
        return torch.cat([part.loss(model(**part.inputs)) for part in task.batches])

    whole = losses()
    with ablate(model, "L1.H0", mode="mean", reference=reference):
        grown = losses() - whole
    assert effect.effect == pytest.approx(grown.mean().item(), rel=1e-5)
    assert (effect.texts, len(whole)) == (40, 40)


def test_too_few_texts_have_no_p(model: PlantedGPT, roles: Roles) -> None:
    task = repetition(model, TOKENIZER, TEXTS, sequences=29)
    effect = roles.effects(model, [task], heads=["L1.H0"]).ablation_effects.alone[0]
    assert effect.low > 1
    assert np.isnan(effect.p)


def after_earlier(n: int) -> list[Choice]:
    """Choices after a repeated word: the word that followed it, and another word."""
    rng = np.random.default_rng(0)
    drawn = (rng.choice(WORDS, 6, replace=False) for _ in range(n))
    return [Choice(" ".join([*five, five[2]]), five[3], wrong) for *five, wrong in drawn]


def test_ablating_the_deciding_head_loses_the_choice(model: PlantedGPT, roles: Roles) -> None:
    chosen = agreement(model, TOKENIZER, after_earlier(40))
    alone = roles.effects(model, [chosen], heads=ALL).ablation_effects.alone
    by_head = {effect.heads[0]: effect.effect for effect in alone}
    # A model without information chooses at random.
    assert by_head["L1.H0"] == pytest.approx(0.5, abs=0.05)
    assert abs(by_head["L1.H1"]) < 1e-6


def test_translation_tests_linked_words_only(model: PlantedGPT) -> None:
    words = [(0, 2), (3, 5), (6, 8), (9, 11), (12, 14)]
    # The word after the second w1 is predicted; the last word has no link.
    text = AnnotatedText("w1 w2 w3 w1 w2", tuple(words), links=((4, 1),))
    task = translation(model, TOKENIZER, [text])
    (batch,) = task.batches
    assert batch.loss(model(**batch.inputs)).item() < 0.01
    unlike = replace(text, links=((2, 1),))
    (batch,) = translation(model, TOKENIZER, [unlike]).batches
    assert batch.loss(model(**batch.inputs)).item() > 1.0


def test_a_custom_behaviour(model: PlantedGPT, roles: Roles) -> None:
    ids = torch.tensor([[8, 9, 10, 8], [20, 21, 22, 21]])

    def unlikely(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        follows = batch["input_ids"][[0, 1], [1, 2]]
        return -output[:, -1].log_softmax(-1)[[0, 1], follows]

    task = behaviour("mine", [{"input_ids": ids}], unlikely, roles=["induction"])
    out = roles.effects(model, [task], heads=["L1.H0"])
    assert out.ablation_effects.alone[0].effect > 1
    assert (out.ablation_effects.alone[0].texts, out.ablation_effects.says["mine"]) == (
        2,
        "a loss of your own",
    )


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".json"])
def test_a_saved_file_loads_equal(two: Roles, tmp_path, ending: str) -> None:
    loaded = Roles.load(two.save(tmp_path / f"roles{ending}"))
    pd.testing.assert_frame_equal(loaded.frame(), two.frame())
    assert loaded.ablation_effects.to_json() == two.ablation_effects.to_json()
    assert loaded.why("L1.H0") == two.why("L1.H0")


def test_measuring_again_replaces_earlier_effects(model: PlantedGPT, roles: Roles) -> None:
    again = roles.effects(model, [repetition(model, TOKENIZER, TEXTS)], heads=ALL)
    pd.testing.assert_frame_equal(again.frame(), roles.frame())
    replaced = roles.effects(model, [agreement(model, TOKENIZER, after_earlier(40))])
    assert "without.repetition" not in replaced.frame()


def test_the_model_is_unchanged(roles: Roles) -> None:
    model = PlantedGPT(ONE).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    roles.effects(model, [repetition(model, TOKENIZER, TEXTS, sequences=5)], heads=[(1, 0)])
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_heads_with_a_role_are_ablated_by_default(two: Roles) -> None:
    assert set(effects(two).index) == set(two.found()["name"])
    assert Head.parse("L0.H0") in {Head.parse(name) for name in effects(two).index}
