"""The effects of ablation, on models built by hand with a known answer."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from headwise.corpora import AnnotatedText, Choice, Mention, name_texts
from headwise.layer import MultiHeadAttention
from headwise.ownership import ablate
from headwise.roles import (
    Behavior,
    Effects,
    Evidence,
    Roles,
    agreement,
    behavior,
    find_roles,
    induction,
    name_moving,
    translation,
)
from headwise.roles._copying import copying_scores
from headwise.roles._rows import labels_of_rows
from headwise.roles.relations import as_item, gold_roles, next_names, tokenize
from headwise.tables import Head
from planted import CUE, IDS, MOVED, TOKENIZER, WORDS, PlantedGPT, lines

TEXTS = lines(64)
ONE = (("before", "even"), ("induction", "even"))
TWO = (("before", "even"), ("induction", "induction", "induction unread"))
ALL = ["L0.H0", "L0.H1", "L1.H0", "L1.H1"]


def tried(layers, heads=None) -> Roles:
    model = PlantedGPT(layers)
    roles = find_roles(model, TEXTS, tokenizer=TOKENIZER, evidence=Evidence(nulls=(), splits=1))
    return roles.effects(model, [induction(model, TEXTS, tokenizer=TOKENIZER)], heads=heads)


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


def test_ablation_separates_heads_that_induction_needs_from_others(roles: Roles) -> None:
    frame = effects(roles)
    guess = np.log(len(IDS))  # the next token is not predicted at all
    assert frame.loc[["L0.H0", "L1.H0"], "effect"].between(0.8 * guess, 1.5 * guess).all()
    assert (frame.loc[["L0.H0", "L1.H0"], "ci_low"] > 0).all()
    assert (frame.loc[["L0.H0", "L1.H0"], "p_adj"] < 0.05).all()
    assert (frame.loc[["L0.H1", "L1.H1"], "effect"].abs() < 1e-6).all()
    assert roles.ablation_effects.groups == ()


def test_effects_stand_beside_the_roles_that_the_behavior_names(roles: Roles) -> None:
    rows = roles.frame().set_index(["name", "role"])
    costs, effect = rows["without.induction"], effects(roles)["effect"]
    assert costs["L1.H0", "prefix matching"] == effect["L1.H0"]
    assert costs["L0.H0", "previous token"] == effect["L0.H0"]
    assert np.isnan(costs["L1.H0", "first token"])
    ends = rows.loc[
        ("L1.H0", "prefix matching"), ["without.induction.low", "without.induction.high"]
    ]
    assert ends.iloc[0] < costs["L1.H0", "prefix matching"] < ends.iloc[1]


@pytest.mark.full
def test_a_head_with_a_role_may_have_no_effect(two: Roles) -> None:
    assert "prefix matching" in two.of("L1.H2")  # it attends to the right token
    assert abs(effects(two).loc["L1.H2", "effect"]) < 1e-6  # but its output is never read


def test_a_head_is_called_induction_only_if_induction_needs_it(roles: Roles, two: Roles) -> None:
    assert roles.of("L1.H0") == ["induction"]
    found = roles.frame().set_index(["name", "role"])["label"]
    assert found["L0.H0", "previous token"] == "previous token"  # needed, and not named after it
    assert found["L1.H1", "prefix matching"] == ""  # not found
    frame = effects(roles)
    assert frame.loc["L1.H0", "control"] < 0.1 * frame.loc["L1.H0", "effect"]
    assert frame.loc["L1.H0", "excess_low"] > 0
    # Alone each of two can be lost, but not both; the third attends alike and is never read.
    assert [two.of(name) for name in ("L1.H0", "L1.H1")] == [["induction"]] * 2
    assert two.of("L1.H2") == ["prefix matching"]
    assert "induction, strongly" in two.why("L1.H0")
    assert "on its control" in two.why("L1.H0")


@pytest.mark.full
def test_before_effects_are_measured_a_pattern_has_its_own_name(model: PlantedGPT) -> None:
    found = find_roles(model, TEXTS, tokenizer=TOKENIZER, evidence=Evidence(nulls=(), splits=1))
    assert found.of("L1.H0") == ["prefix matching"]


def test_a_loss_on_the_control_as_well_earns_no_label(model: PlantedGPT, roles: Roles) -> None:
    task = induction(model, TEXTS, tokenizer=TOKENIZER)
    unspecific = replace(task, control=task.batches)
    again = roles.effects(model, [unspecific], heads=["L1.H0"])
    assert effects(again).loc["L1.H0", "excess_low"] == 0
    assert again.of("L1.H0") == ["prefix matching"]


def test_a_behavior_of_the_user_names_its_heads(model: PlantedGPT, roles: Roles) -> None:
    task = induction(model, TEXTS, tokenizer=TOKENIZER)
    mine = replace(task, name="mine", labels={"prefix matching": "name moving"})
    assert roles.effects(model, [mine], heads=["L1.H0"]).of("L1.H0") == ["name moving"]


@pytest.mark.parametrize(
    ("role", "low", "high", "label"),
    [
        ("prefix matching", 0.2, 0.9, "induction"),
        ("prefix matching", -0.1, 0.9, "prefix matching"),
        ("prefix matching", -0.9, -0.2, "prefix matching"),
        ("same token", -0.9, -0.2, "duplicate suppression"),
        ("same token", -0.9, 0.1, "same token"),
        ("same token", 0.2, 0.9, "same token"),
        ("previous token", 0.2, 0.9, "previous token"),
    ],
)
def test_the_copying_score_names_a_behavior_if_its_whole_interval_has_the_sign(
    role: str, low: float, high: float, label: str
) -> None:
    row = {"name": "L0.H0", "role": role, "copying.low": low, "copying.high": high, "found": True}
    assert labels_of_rows(pd.DataFrame([row, row | {"found": False}])) == [label, ""]
    unknown = {name: x for name, x in row.items() if not name.startswith("copying")}
    assert labels_of_rows(pd.DataFrame([unknown])) == [role]


class Writing(torch.nn.Module):
    """One layer that writes what it reads, its opposite, noise or nothing, then capped logits."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        V = len(IDS)
        self.config = SimpleNamespace(context=48)
        self.layer = MultiHeadAttention(V, 4, head_dim=V)
        self.norm, self.head = norm, torch.nn.Linear(V, V, bias=False)
        noise = torch.randn(V, V, generator=torch.Generator().manual_seed(0))
        writes = torch.cat([torch.eye(V), -torch.eye(V), noise, torch.zeros(V, V)], dim=1)
        with torch.no_grad():
            self.layer.v_proj.weight.copy_(torch.eye(V).repeat(4, 1))
            self.layer.out_proj.weight.copy_(writes)
            self.head.weight.copy_(torch.eye(V))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(input_ids, len(IDS)).float()
        x = x + self.layer(x, mask=attention_mask.bool()[:, None, None], causal=True)
        return 9 * (self.head(self.norm(x)) / 9).tanh()


@pytest.mark.parametrize(
    "norm", [torch.nn.Identity(), torch.nn.LayerNorm(len(IDS)), torch.nn.RMSNorm(len(IDS))]
)
def test_the_copying_score_tells_copying_from_suppression_and_noise(norm) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.choice(np.arange(6, 40), 20, replace=False).tolist() for _ in range(40)]
    scores = [score for _, score in sorted(copying_scores(Writing(norm), sequences).items())]
    assert scores[0][0] == pytest.approx(1.0)
    assert scores[1][0] == pytest.approx(-1.0)
    assert scores[2][1] < 0.2
    assert scores[2][2] > -0.2
    assert scores[3] == (0.0, 0.0, 0.0)


def test_a_model_without_an_unembedding_has_no_copying_score(model: PlantedGPT) -> None:
    assert copying_scores(model, [[6, 7, 8, 9]]) == {}

    class Unembedded(Writing):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.one_hot(input_ids, len(IDS)).float()
            return self.layer(x)  # what returns its output is the output projection

    assert copying_scores(Unembedded(torch.nn.Identity()), [[6, 7, 8, 9]]) == {}


class BareLayer(torch.nn.Module):
    """Attention whose output projection is a bare parameter, one matrix per head."""

    def __init__(self, layer: MultiHeadAttention, style: str) -> None:
        super().__init__()
        self.inner, self.style = layer, style
        H, D = layer.n_heads, layer.head_dim
        weight = layer.out_proj.weight.detach().clone()
        self.W_O = torch.nn.Parameter(weight.T.reshape(H, D, -1))

    def forward(self, x: torch.Tensor, mask=None, causal=True) -> torch.Tensor:
        projections = self.inner.q_proj, self.inner.k_proj, self.inner.v_proj
        q, k, v = (
            p(x).unflatten(-1, (self.inner.n_heads, -1)).transpose(1, 2) for p in projections
        )
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        visible = visible if mask is None else visible & mask
        if self.style == "fused":
            attend = torch.nn.functional.scaled_dot_product_attention
            heads = attend(q, k, v, attn_mask=visible)
        else:
            logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
            heads = torch.einsum("bhts,bhsd->bhtd", logits.softmax(-1), v)
        return torch.einsum("bhtd,hdm->btm", heads, self.W_O)


@pytest.mark.full
@pytest.mark.parametrize("style", ["fused", "by hand"])
def test_effects_where_the_output_projection_is_a_bare_parameter(roles: Roles, style: str) -> None:
    model = PlantedGPT(ONE)
    model.layers = torch.nn.ModuleList(BareLayer(layer, style) for layer in model.layers)
    found = find_roles(model, TEXTS, tokenizer=TOKENIZER, evidence=Evidence(nulls=(), splits=1))
    out = found.effects(model, [induction(model, TEXTS, tokenizer=TOKENIZER)], heads=ALL)
    expected = effects(roles)["effect"]
    np.testing.assert_allclose(effects(out)["effect"], expected, atol=1e-3)
    assert out.of("L1.H0") == ["induction"]


def test_two_copies_of_a_head_back_each_other_up(two: Roles) -> None:
    assert (effects(two).loc[["L1.H0", "L1.H1"], "effect"].abs() < 0.01).all()
    (group,) = two.ablation_effects.groups
    assert group.together.heads == (
        "L1.H0",
        "L1.H1",
    )  # the head whose output is never read is not part of it
    assert (group.role, group.together.behavior) == ("prefix matching", "induction")
    assert group.together.low > 1.0 > 100 * abs(group.alone)
    assert "L1.H0 and L1.H1 back each other up" in two.why("L1.H0")
    assert "back each other up" not in two.why("L1.H2")


def test_an_effect_equals_mean_ablation_over_the_same_texts(
    model: PlantedGPT, roles: Roles
) -> None:
    task = induction(model, TEXTS, tokenizer=TOKENIZER, sequences=40)
    effect = roles.effects(model, [task], heads=["L1.H0"]).ablation_effects.alone[0]
    reference = [batch.inputs for batch in task.batches]

    def losses() -> torch.Tensor:
        return torch.cat([part.loss(model(**part.inputs)) for part in task.batches])

    whole = losses()
    with ablate(model, "L1.H0", mode="mean", reference=reference):
        grown = losses() - whole
    assert effect.effect == pytest.approx(grown.mean().item(), rel=1e-5)
    assert (effect.texts, len(whole)) == (40, 40)


def after_earlier(n: int) -> list[Choice]:
    """Choices after a repeated word: the word that followed it, and another word."""
    rng = np.random.default_rng(0)
    drawn = (rng.choice(WORDS, 6, replace=False) for _ in range(n))
    return [Choice(" ".join([*five, five[2]]), five[3], wrong) for *five, wrong in drawn]


def test_ablating_the_deciding_head_loses_the_choice(model: PlantedGPT, roles: Roles) -> None:
    chosen = agreement(model, after_earlier(40), tokenizer=TOKENIZER)
    alone = roles.effects(model, [chosen], heads=ALL).ablation_effects.alone
    by_head = {effect.heads[0]: effect.effect for effect in alone}
    # A model without information chooses at random.
    assert by_head["L1.H0"] == pytest.approx(0.5, abs=0.05)
    assert abs(by_head["L1.H1"]) < 1e-6


def test_too_few_texts_have_no_p_however_often_they_are_given(
    model: PlantedGPT, roles: Roles
) -> None:
    few = induction(model, TEXTS, tokenizer=TOKENIZER, sequences=29)
    twice = replace(few, name="twice", batches=[*few.batches] * 2, control=[*few.control] * 2)
    choices = after_earlier(20)
    chosen = agreement(model, [*choices, *choices], tokenizer=TOKENIZER)
    # Other words after the same text are another choice.
    swapped = [replace(choice, right=choice.wrong, wrong=choice.right) for choice in choices]
    others = agreement(model, [*choices, *swapped], tokenizer=TOKENIZER, name="others")
    tasks = [few, twice, chosen, others]
    alone = roles.effects(model, tasks, heads=["L1.H0"]).ablation_effects.alone
    assert [effect.texts for effect in alone] == [29, 29, 20, 40]
    assert [np.isnan(effect.p) for effect in alone] == [True, True, True, False]
    assert alone[0].low > 1
    assert replace(alone[1], behavior="induction", p=0.0) == replace(alone[0], p=0.0)


def test_translation_tests_linked_words_only(model: PlantedGPT) -> None:
    words = [(0, 2), (3, 5), (6, 8), (9, 11), (12, 14)]
    # The word after the second w1 is predicted; the last word has no link.
    text = AnnotatedText("w1 w2 w3 w1 w2", tuple(words), links=((4, 1),))
    task = translation(model, [text], tokenizer=TOKENIZER)
    (batch,) = task.batches
    assert batch.loss(model(**batch.inputs)).item() < 0.01
    unlike = replace(text, links=((2, 1),))
    (batch,) = translation(model, [unlike], tokenizer=TOKENIZER).batches
    assert batch.loss(model(**batch.inputs)).item() > 1.0


def test_a_custom_behavior(model: PlantedGPT, roles: Roles) -> None:
    ids = torch.tensor([[8, 9, 10, 8], [20, 21, 22, 21]])

    def unlikely(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        follows = batch["input_ids"][[0, 1], [1, 2]]
        return -output[:, -1].log_softmax(-1)[[0, 1], follows]

    task = behavior("mine", [{"input_ids": ids}], unlikely, roles=["prefix matching"])
    out = roles.effects(model, [task], heads=["L1.H0"])
    assert out.ablation_effects.alone[0].effect > 1
    assert (out.ablation_effects.alone[0].texts, out.ablation_effects.says["mine"]) == (
        2,
        "a loss of your own",
    )


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".json"])
def test_a_saved_file_loads_equal(two: Roles, tmp_path, ending: str) -> None:
    loaded = Roles.load(two.save(tmp_path / f"roles{ending}"))
    assert loaded.sample == two.sample
    assert {*two.sample} == {"texts", "held_out", "sha256", "seed"}
    assert str(two.sample["sha256"])[:16] in str(two.notes)
    pd.testing.assert_frame_equal(loaded.frame(), two.frame())
    assert loaded.ablation_effects.to_json() == two.ablation_effects.to_json()
    assert loaded.why("L1.H0") == two.why("L1.H0")


@pytest.mark.full
def test_measuring_again_replaces_earlier_effects(model: PlantedGPT, roles: Roles) -> None:
    again = roles.effects(model, [induction(model, TEXTS, tokenizer=TOKENIZER)], heads=ALL)
    pd.testing.assert_frame_equal(again.frame(), roles.frame())
    replaced = roles.effects(model, [agreement(model, after_earlier(40), tokenizer=TOKENIZER)])
    assert "without.induction" not in replaced.frame()


def test_heads_with_a_role_are_ablated_by_default(two: Roles) -> None:
    assert set(effects(two).index) == set(two.found()["name"])
    assert Head.parse("L0.H0") in {Head.parse(name) for name in effects(two).index}


# Name moving: attention to the name that has to follow, and an effect; on heads built by hand.


PATTERNS = (
    f"{{one}} w3 {{two}} w1 {{again}} {CUE} {{other}} .",
    f"w4 {{two}} w2 w5 {{one}} w6 {{again}} {CUE} {{other}} , w1",
)
NAME_TEXTS = name_texts(160, names=MOVED, patterns=PATTERNS)
LAYERS = (("before", "even"), ("move", "move unread", "move any", "even"))


@pytest.fixture(scope="module")
def mover() -> PlantedGPT:
    return PlantedGPT(LAYERS)


@pytest.fixture(scope="module")
def task(mover: PlantedGPT) -> Behavior:
    return name_moving(mover, NAME_TEXTS, tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def found(mover: PlantedGPT) -> Roles:
    return find_roles(mover, NAME_TEXTS, tokenizer=TOKENIZER, evidence=Evidence(("shuffled",)))


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


@pytest.mark.full
def test_a_head_that_chooses_the_name_has_the_role_before_any_effect(found: Roles) -> None:
    rows = found.found()
    assert set(rows.loc[rows["role"] == "next name", "name"]) == {"L1.H0", "L1.H1"}
    assert found.of("L1.H0") == found.of("L1.H1") == ["next name"]
    row = found.frame().set_index(["role", "name"]).loc["next name"]
    assert row.loc["L1.H2", "effect"] == pytest.approx(1 / 3, abs=0.02)  # of three names
    assert row.loc["L1.H0", "rule.nearest"] == 0.0  # it is the one that repeats
    assert row.loc["L1.H0", "rule.first"] == pytest.approx(0.5, abs=0.2)
    assert row.loc["L1.H0", "control"] > 0.5


def test_the_control_differs_in_the_last_name_alone(task: Behavior) -> None:
    names = {TOKENIZER.get_vocab()[name] for name in MOVED}
    for batch, control in zip(task.batches, task.control, strict=True):
        rows = zip(batch.inputs["input_ids"], control.inputs["input_ids"], strict=True)
        for ids, other in rows:
            place = int((ids != other).nonzero())
            assert int(ids[place]) in ids[:place]
            assert int(other[place]) not in ids
            assert int(other[place]) in names


def test_moving_needs_attention_and_effect(mover: PlantedGPT, task: Behavior, found: Roles) -> None:
    heads = ["L1.H0", "L1.H1", "L1.H2"]
    roles = found.effects(mover, [task], heads=heads)
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


def test_a_loss_on_its_control_as_well_is_no_name_moving(
    mover: PlantedGPT, task: Behavior, found: Roles
) -> None:
    unspecific = replace(task, control=task.batches)
    assert found.effects(mover, [unspecific], heads=["L1.H0"]).of("L1.H0") == ["next name"]


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


def test_names_of_several_tokens_move(mover: PlantedGPT) -> None:
    names = [f"{one} {two}" for one, two in zip(MOVED[::2], MOVED[1::2], strict=True)]
    texts = name_texts(120, names=names, patterns=PATTERNS)
    task = name_moving(mover, texts, tokenizer=TOKENIZER)
    for batch, control in zip(task.batches, task.control, strict=True):
        assert ((batch.inputs["input_ids"] != control.inputs["input_ids"]).sum(1) == 2).all()
    roles = find_roles(mover, texts, tokenizer=TOKENIZER, evidence=Evidence(()))
    assert roles.outcomes().set_index("role").loc["next name", "n"] > 20
