"""A copy of a model, made or saved while it is watched or ablated, is a plain model."""

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import headwise as hw

INSIDE: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "observe": hw.observe,
    "ablate": lambda model: hw.ablate(model, "L0.H1"),
}


def _torch() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "Bert": (lambda: zoo.make("Bert"), torch.tensor([[1, 2, 3, 4]])),
    "ours": (lambda: hw.MultiHeadAttention(12, 3), torch.randn(1, 4, 12)),
    "torch": (_torch, torch.randn(1, 4, 12)),
}


def _saved_and_read(model: nn.Module) -> nn.Module:
    held = io.BytesIO()
    torch.save(model, held)
    return torch.load(io.BytesIO(held.getvalue()), weights_only=False)


def _answer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = model(x)
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("copied", [copy.deepcopy, _saved_and_read])
def test_a_copy_is_neither_watched_nor_ablated(
    name: str, inside: str, copied: Callable[[nn.Module], nn.Module]
) -> None:
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = make()
    expected = _answer(model, x)
    with INSIDE[inside](model) as block:
        within = _answer(model, x)
        twin = copied(model)
        torch.testing.assert_close(_answer(twin, x), expected)
        if inside == "observe":
            assert (block.table().count("entropy") == x.shape[1]).all()
    torch.testing.assert_close(_answer(twin, x), expected)
    assert torch.equal(_answer(model, x), expected)
    assert torch.allclose(within, expected) == (inside == "observe")
