"""Importance on every architecture: gradients are slopes."""

from typing import Any

import pytest
import torch
import zoo
from families import make_family
from torch import Tensor, nn

from double import Double, doubled
from gates import gate_heads
from headwise.errors import ArgumentError
from headwise.ownership import find_attentions
from headwise.scoring import Loss, find_loss, importance
from oracles import padded
from tiers import tiers

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
ARCHITECTURES = zoo.mixing()


def _batch() -> dict[str, Tensor]:
    batch = padded(TEXTS, "right")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _squared(output: Any, batch: Any) -> Tensor:
    """A loss with a slope everywhere, at the full model too."""
    real = batch["attention_mask"][..., None]
    # Not of all features: a norm at the end keeps their sum of squares as it is.
    return (output[0][..., :5].square() * real).sum((1, 2))


def test_a_decoder_that_may_read_images_predicts_text() -> None:
    model, ids = make_family("Qwen3.5-VL, text"), torch.tensor([[5, 9, 7, 3]])
    for labels in ({}, {"labels": ids}):
        assert find_loss(None, model, {"input_ids": ids} | labels).name == "lm"
    images = {"input_ids": ids, "pixel_values": torch.zeros(1)}  # whose places have no label
    with pytest.raises(ArgumentError, match="no default loss fits Qwen3_5ForConditionalGen"):
        find_loss(None, model, images)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("method", tiers(["half-gate"], ["gradient"]))
def test_gradients_of_gates_are_slopes(name: str, method: str) -> None:
    gate = 0.5 if method == "half-gate" else 1.0
    model, batch = doubled(zoo.make(name)), _batch()
    loss = find_loss(None, model, batch)
    if loss.compares and method == "gradient":  # it is flat at the full model
        loss = Loss("squared", _squared)
    with Double():
        attentions = find_attentions(model, batch)
        full = loss.of(model(**batch), batch).detach() if loss.compares else None

    def losses(gates: Tensor) -> Tensor:
        with gate_heads(model, attentions, lambda a: gates[attentions.index(a)]):
            return loss.per_text(model(**batch), batch, full)

    with Double():
        scores = importance(model, [batch], method, loss=loss)
        slopes = []
        for head in scores.heads:
            step = torch.zeros(2, zoo.HEADS, dtype=torch.float64)
            step[head.layer, head.head] = 1e-5
            with torch.no_grad():
                slopes.append((losses(gate + step) - losses(gate - step)) / 2e-5)
        gates = torch.full((2, zoo.HEADS), gate, dtype=torch.float64, requires_grad=True)
        losses(gates).sum().backward()
    expected = torch.stack(slopes, 1).abs()
    assert abs(scores.per_text - expected.numpy()).max() <= 1e-6 * expected.max()
    # The same by the weights: a gate scales the columns of its head in the output projection.
    by_gates: dict[nn.Module, Tensor] = {}
    for attention, slope in zip(attentions, gates.grad * gate, strict=True):
        module = attention.output.module  # layers may share theirs
        by_gates[module] = by_gates.get(module, 0) + slope
    for attention in attentions:
        weight = attention.output.weight
        product = (weight * weight.grad).movedim(attention.output.in_axis, 0)
        by_weights = product.unflatten(0, (zoo.HEADS, -1)).flatten(1).sum(1)
        gap = (by_weights - by_gates[attention.output.module]).abs().max()
        assert gap <= 1e-9 * expected.max()
