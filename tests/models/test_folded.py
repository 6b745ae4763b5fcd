"""Importance where attention folds windows, frames or channels of a text into the batch."""

from typing import Any

import numpy as np
import pytest
import torch
from architectures import CASES
from torch import Tensor, nn

from gates import gate_heads
from headwise.errors import UnsupportedError
from headwise.ownership import find_attentions
from headwise.scoring import importance
from tiers import tiers

# Name -> the rows of its inputs that are one text.
FOLDED = {
    "DonutSwinModel": 1,
    "MobileViTModel": 1,
    "MusicgenForCausalLM": 2,
    "PatchTSTModel": 1,
    "SamVisionModel": 1,
    "SwinModel": 1,
    "Swinv2Model": 1,
    "TimesformerModel": 1,
    "VitDetModel": 1,
}
_FEW = ("MusicgenForCausalLM", "SwinModel")


def _loss(output: Any, batch: Any) -> Tensor:
    rows = len(next(iter(batch.values())))
    states = next(x for x in output.values() if isinstance(x, Tensor) and len(x) == rows)
    return (states.flatten(1)[:, ::3]).square().mean(1)


@pytest.mark.parametrize("name", tiers(_FEW, FOLDED))
def test_each_text_has_the_slopes_that_it_has_alone(name: str) -> None:
    model, batch = CASES[name].make()
    model.double()
    batch = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    scores = importance(model, [batch], "half-gate", loss=_loss)
    rows = FOLDED[name]
    texts = len(next(iter(batch.values()))) // rows
    assert len(scores.per_text) == texts == 2
    for text in range(texts):
        alone = {k: x.tensor_split(texts)[text] for k, x in batch.items()}
        attentions = find_attentions(model, alone)
        gates = [torch.full((a.site.n_heads,), 0.5, requires_grad=True) for a in attentions]
        by_attention = dict(zip(attentions, gates, strict=True))
        with gate_heads(model, attentions, by_attention.__getitem__):
            loss = _loss(model(**alone), alone).mean()
        slopes = torch.cat(torch.autograd.grad(loss, gates)).abs()
        np.testing.assert_allclose(scores.per_text[text], slopes, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", ["MusicgenForCausalLM", "SwinModel"])
@pytest.mark.parametrize("method", ["ablation", "zero-ablation"])
def test_ablations_have_as_many_texts(name: str, method: str) -> None:
    model, batch = CASES[name].make()
    scores = importance(model, [batch], method, loss=_loss)
    assert len(scores.per_text) == 2
    assert (scores.per_text[0] != scores.per_text[1]).all()


class _Rows(nn.Module):
    """Attends in rows of two texts each, whose attention belongs to no single text."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.proj = 2, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(2, -1, self.num_heads, 3).transpose(1, 2)
        heads = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        out: Tensor = self.proj(heads.transpose(1, 2).reshape(2, -1, 6))
        return out.reshape(x.shape)


def test_rows_that_texts_cannot_share_are_refused() -> None:
    batch = {"x": torch.randn(3, 4, 6)}
    message = r"importance: the model attends in 2 rows for 3 texts, so that it is unknown which"
    with pytest.raises(UnsupportedError, match=message):
        importance(_Rows(), [batch], loss=lambda output, batch: output.square().mean((1, 2)))
