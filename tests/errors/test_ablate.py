"""Heads that cannot be ablated are refused by name, and the model is unchanged."""

from typing import Any

import pytest
import torch
from torch import nn

from gates import gate_heads
from headwise import ablate, prune
from headwise.errors import ArgumentError, HeadError, UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.ownership import (
    find_attentions,
)
from oracles import modules_of

X = torch.randn(2, 5, 12)


def _refused(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    before = modules_of(model)
    try:
        with ablate(model, *args, **kwargs):
            raise AssertionError("it began")
    finally:
        assert modules_of(model) == before


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((0, 4), r"no head \(0, 4\).*There are 4, from L0.H0 to L0.H3"),
        ("L1.H0", "no head L1.H0"),
        (["L0.H1", (0, 1)], "L0.H1 is named twice"),
        ("H3", "'H3' names no head"),
        (3, "3 names no heads"),
        ([3], "3 names no head"),
        ({0: 1}, r"\{0: 1\} names no heads"),
    ],
)
def test_a_missing_head_or_one_named_twice(heads: Any, message: str) -> None:
    with pytest.raises(HeadError, match=message):
        _refused(MultiHeadAttention(12, 4), heads)


def test_an_unknown_mode() -> None:
    with pytest.raises(ArgumentError, match="mode='median'"):
        _refused(MultiHeadAttention(12, 4), (0, 1), mode="median")


@pytest.mark.parametrize("reference", ["a text", ["a text"]])
def test_a_reference_of_texts(reference: Any) -> None:
    message = ": reference holds the text 'a text'"
    with pytest.raises(ArgumentError, match=f"ablate{message}"):
        _refused(MultiHeadAttention(12, 4), (0, 1), mode="mean", reference=reference)
    with pytest.raises(ArgumentError, match=f"prune{message}"):
        prune(MultiHeadAttention(12, 4), (0, 1), fold="mean", reference=reference)


def test_a_reference_without_a_batch() -> None:
    with pytest.raises(ArgumentError, match="holds no batch"):
        _refused(MultiHeadAttention(12, 4), (0, 1), mode="mean", reference=[])


def test_a_model_without_attention() -> None:
    with pytest.raises(UnsupportedError, match="no attention was captured in Sequential"):
        find_attentions(nn.Sequential(nn.Linear(12, 3)), X)


def test_a_model_without_weights() -> None:
    with pytest.raises(ArgumentError, match="ReLU has no weights"):
        _refused(nn.ReLU(), (0, 0))


def test_a_model_with_unknown_inputs() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MultiHeadAttention(12, 4)

        def forward(self, spectrum: torch.Tensor) -> torch.Tensor:
            return self.layer(spectrum)

    with pytest.raises(ArgumentError, match=r"inputs of Own .*\(spectrum\)"):
        _refused(Own(), (0, 1))
    assert len(find_attentions(Own(), X)) == 1


def test_a_layer_without_an_output_projection() -> None:
    with pytest.raises(UnsupportedError, match="attention has no output projection"):
        _refused(MultiHeadAttention(12, 4, out_proj=False), (0, 1))


class _Normed(nn.Module):
    """A layer that normalises its heads together before the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.proj = nn.Linear(12, 36), nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 3)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(self.norm(heads.transpose(1, 2).flatten(2)))


def test_heads_mixed_before_the_output_projection() -> None:
    with pytest.raises(UnsupportedError, match=r"changes its heads before 0\.proj"):
        find_attentions(nn.Sequential(_Normed()), X)


class _Twice(nn.Module):
    """One layer used twice, recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MultiHeadAttention(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)
        return x


def test_shared_layers_with_gradient_checkpointing() -> None:
    model = _Twice()
    attentions = find_attentions(model, X)
    gates = torch.ones(4)
    with gate_heads(model, attentions, lambda _: gates):
        loss = model(X.clone().requires_grad_()).sum()
        with pytest.raises(UnsupportedError, match=r"layer\.attention is shared by 2 layers"):
            loss.backward()
