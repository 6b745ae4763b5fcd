"""The example of a small model that sees: its drawings, and its heads before and after training."""

import pytest
import torch

import headwise as hw
from examples.where_it_looks import accuracy, drawings, examples, scrambled, train, untrained


def test_the_processor_makes_the_inputs_that_the_model_is_trained_on() -> None:
    _, processor = untrained()
    seen = drawings(3, 0)
    inputs = seen.inputs()
    for n in range(3):
        made = processor(images=[seen.image(n)], text=seen.question(n), return_tensors="pt")
        for name, x in inputs.items():
            torch.testing.assert_close(made[name], x[[n]], rtol=0, atol=1e-6)


@pytest.mark.full
def test_examples_with_images_score_the_heads_that_read_them() -> None:
    """Random weights find nothing; each head's share is that of its weights."""
    model, processor = untrained()
    seen = drawings(60, 0)
    found = hw.find_heads(
        model.eval(), examples(model, processor, seen), evidence=hw.Evidence(nulls=())
    )
    assert not found.frame()["found"].any()
    weights = torch.cat([*hw.attentions(model, seen.inputs(), queries=-1).language], 1)[..., 0, :16]
    right = weights.argmax(-1) == seen.of_asked(seen.patches)[:, None]
    rows = found.frame()
    assert (rows["name"].str.startswith("language.")).all()
    halves = (rows["effect"] + rows["chosen_half"]) / 2
    assert halves.to_numpy() == pytest.approx(right.double().mean(0).numpy(), abs=1e-6)


@pytest.mark.full
def test_a_trained_model_looks_at_what_the_last_word_names() -> None:
    model, processor = untrained()
    train(model)
    seen = drawings(200, 1)
    assert accuracy(model, seen) >= 0.95
    found = hw.find_heads(model, examples(model, processor, seen))
    assert found.set_row["found"]
    assert found.set_row["effect"] >= 0.9
    assert found.frame()[["null.permuted", "null.random"]].max(axis=None) < 0.5
    without = hw.find_heads(model, examples(model, processor, scrambled(seen)))
    assert not without.frame()["found"].any()
    assert without.frame()["effect"].max() < 0.25
