"""Every architecture: importance is the slope of the loss, and models restart where they may."""

from functools import partial

import pytest
import torch
import zoo
from torch import Tensor

from double import Double, doubled
from headwise.gauge import find_loss, importance
from headwise.models import Attention, find_attentions, gate_heads
from oracles import padded

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
ARCHITECTURES = zoo.mixing()


def _batch() -> dict[str, Tensor]:
    batch = padded(TEXTS, "right")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_half_gate_is_the_slope_of_the_loss(name: str) -> None:
    model, batch = doubled(zoo.make(name)), _batch()
    loss = find_loss(None, model, batch)
    with Double():
        found = find_attentions(model, batch)
        full = loss.of(model(**batch), batch).detach() if loss.compares else None

    def losses(gates: Tensor) -> Tensor:
        with torch.no_grad(), gate_heads(model, found, lambda one: gates[found.index(one)]):
            return loss.per_text(model(**batch), batch, full)

    with Double():
        scores = importance(model, [batch])
        slopes = []
        for head in scores.heads:
            step = torch.zeros(2, zoo.HEADS, dtype=torch.float64)
            step[head.layer, head.head] = 1e-5
            slopes.append((losses(0.5 + step) - losses(0.5 - step)).abs() / 2e-5)
    expected = torch.stack(slopes, 1).numpy()
    assert abs(scores.per_text - expected).max() <= 1e-6 * expected.max()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_restarted_model_gives_what_the_whole_one_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = zoo.make(name), _batch()
    first, last = (find_attentions(model, batch)[at] for at in (0, -1))
    ran = dict.fromkeys((first, last), 0)

    def count(attention: Attention, *_: object) -> None:
        ran[attention] += 1

    for attention in ran:
        attention.output.module.register_forward_hook(partial(count, attention))
    short = {name: tensor[:2, :4] for name, tensor in batch.items()}
    restarted = importance(model, [batch, short], "zero-ablation")
    shared = first.module is last.module
    # Of the eight heads the last four leave the first layer alone, in each batch.
    assert shared or ran[first] <= ran[last] - 8
    monkeypatch.setattr("headwise.gauge._replay._block", lambda *_: None)
    whole = importance(model, [batch, short], "zero-ablation")
    assert (restarted.per_text == whole.per_text).all()
