"""Each refusal when effects are measured says what is wrong."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from headwise.corpora import AnnotatedText, Choice, name_texts
from headwise.errors import ArgumentError, HeadError, InputError, ShapeError, UnsupportedError
from headwise.models.ownership import (
    check_edits_reach,
    find_attentions,
    replace_heads,
)
from headwise.roles import (
    Evidence,
    agreement,
    behaviour,
    find_roles,
    name_moving,
    repetition,
    translation,
)
from planted import TOKENIZER, Planted, PlantedGPT, lines

MODEL = PlantedGPT([("before",), ("induction",)])
CHOICE = Choice("w1 w2 w1", "w2", "w3")


@pytest.fixture(scope="module")
def roles():
    return find_roles(MODEL, TOKENIZER, lines(6), evidence=Evidence(nulls=()))


def test_a_behaviour_without_texts():
    with pytest.raises(ArgumentError, match="behaviour: batches holds no batch"):
        behaviour("mine", [], lambda output, batch: output)
    with pytest.raises(
        ArgumentError, match=r"behaviour: none of these texts has a target for PlantedGPT"
    ):
        translation(MODEL, TOKENIZER, [AnnotatedText("w1 w2")])
    with pytest.raises(ArgumentError, match=r"none of these texts has a target for PlantedGPT"):
        repetition(MODEL, TOKENIZER, ["w1 w2"])
    # One text has no other name for its control.
    for texts in ([AnnotatedText("w1 w2")], name_texts(1, names=["w1", "w2"])):
        with pytest.raises(ArgumentError, match=r"none of these texts has a target for PlantedGPT"):
            name_moving(MODEL, TOKENIZER, texts)


def test_two_choices_with_the_same_tokens():
    with pytest.raises(
        InputError, match=r"'w2' and 'w2' after 'w1' do not differ within .* first 48"
    ):
        agreement(MODEL, TOKENIZER, [Choice("w1", "w2", "w2")])


def test_a_choice_longer_than_the_context():
    far = Choice(" ".join(["w1"] * 60), "w2", "w3")
    with pytest.raises(
        InputError, match=r"'w2' and 'w3' after ' w1.* first 48 tokens\. Give .* fewer"
    ):
        agreement(MODEL, TOKENIZER, [far])


def test_a_model_that_looks_ahead():
    class Ahead(PlantedGPT):
        def forward(self, input_ids, attention_mask=None):
            return super().forward(input_ids.flip(1)).flip(1)

    with pytest.raises(UnsupportedError, match=r"behaviour: Ahead looks ahead"):
        agreement(Ahead([("before",), ("induction",)]), TOKENIZER, [CHOICE])


def test_a_model_without_logits():
    class Headless(Planted):
        def forward(self, input_ids, attention_mask=None):
            return SimpleNamespace(last_hidden_state=super().forward(input_ids))

    with pytest.raises(UnsupportedError, match=r"behaviour: Headless gives no logits for each"):
        agreement(Headless([("offset -1",)], causal=True), TOKENIZER, [CHOICE])


def test_behaviours_need_distinct_names(roles):
    chosen = agreement(MODEL, TOKENIZER, [CHOICE])
    with pytest.raises(
        ArgumentError, match=r"effects: behaviours are named agreement, agreement\."
    ):
        roles.effects(MODEL, [chosen, chosen])
    with pytest.raises(ArgumentError, match=r"effects: behaviours are named nothing"):
        roles.effects(MODEL, [])


def test_a_loss_that_is_nan(roles):
    batches = [{"input_ids": torch.tensor([[8, 9, 8], [9, 8, 9]])}]
    broken = behaviour("broken", batches, lambda output, batch: output[:, 0, 0].log())
    with pytest.raises(ArgumentError, match=r"effects: 'broken' is not finite on 2 of 2 texts"):
        roles.effects(MODEL, [broken])


def test_a_loss_that_is_not_one_number_for_each_text(roles):
    mean = behaviour(
        "mean", [{"input_ids": torch.tensor([[8, 9]])}], lambda output, _: output.mean()
    )
    with pytest.raises(ShapeError, match=r"effects: 'mean' gives a loss of shape \(\)\. Give one"):
        roles.effects(MODEL, [mean])


def test_roles_of_another_model(roles):
    model = PlantedGPT([("before", "even"), ("induction", "even")])
    with pytest.raises(
        ArgumentError, match=rf"effects: these are roles of the model {roles.model}"
    ):
        roles.effects(model, [agreement(model, TOKENIZER, [CHOICE])])


def test_a_missing_head(roles):
    with pytest.raises(HeadError, match=r"L7\.H0"):
        roles.effects(MODEL, [agreement(MODEL, TOKENIZER, [CHOICE])], heads=["L7.H0"])


def test_labels_without_a_control(roles):
    task = repetition(MODEL, TOKENIZER, lines(6), sequences=4)
    with pytest.raises(ArgumentError, match=r"'repetition' has labels \{'prefix.* no control"):
        replace(task, control=())
    batches = [{"input_ids": torch.tensor([[8, 9, 8]])}]
    with pytest.raises(ArgumentError, match=r"Behaviour: 'mine' has labels \{'r': 'moving'\}"):
        behaviour("mine", batches, lambda output, _: output[:, 0, 0], labels={"r": "moving"})


def test_a_control_of_another_size(roles):
    task = repetition(MODEL, TOKENIZER, lines(6), sequences=4)
    fewer = repetition(MODEL, TOKENIZER, lines(6), sequences=3)
    with pytest.raises(ArgumentError, match=r"'repetition' has 4 texts and 3 of its control"):
        roles.effects(MODEL, [replace(task, control=fewer.control)])


class Unprojected(torch.nn.Module):
    """Attention without an output projection; its output may be ignored."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.embed, self.read = torch.nn.Embedding(9, 4), read

    def forward(self, input_ids):
        x = self.embed(input_ids)[:, None]
        heads = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return (x + heads if self.read else x)[:, 0]


def test_heads_whose_output_is_never_read_cannot_be_edited():
    model, batch = Unprojected(read=False), {"input_ids": torch.tensor([[1, 2, 3]])}
    attentions = find_attentions(model, batch, needs_projections=False)
    with pytest.raises(UnsupportedError, match=r"edits of the heads of .* do not reach the output"):
        check_edits_reach(model, attentions, batch)
    with pytest.raises(UnsupportedError, match=r"has no output projection"):
        _ = attentions[0].output


def test_heads_without_a_projection_are_not_edited_under_gradients():
    model, batch = Unprojected(read=True), {"input_ids": torch.tensor([[1, 2, 3]])}
    attentions = find_attentions(model, batch, needs_projections=False)
    check_edits_reach(model, attentions, batch)
    chosen = {attentions[0]: [0]}
    with (
        replace_heads(model, attentions, chosen, lambda _, heads: heads * 0),
        pytest.raises(UnsupportedError, match=r"Unprojected has no output .*no_grad"),
    ):
        model(**batch)
    assert not model._forward_hooks
