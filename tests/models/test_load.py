"""Every saved model can be loaded: the size limit is never too strict."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo

from headwise.models import load

_FEW = ("Albert", "Gemma2", "GPT2", "GptOss", "Llama", "Qwen3Moe")


def _names() -> list[Any]:
    return [n if n in _FEW else pytest.param(n, marks=pytest.mark.full) for n in sorted(zoo.TEXT)]


@pytest.mark.parametrize("name", _names())
def test_a_saved_model_can_be_loaded(name: str, tmp_path: Path) -> None:
    model: Any = zoo.make(name)
    model.save_pretrained(tmp_path)
    opened = load(tmp_path)
    weights = dict(opened.named_parameters())
    assert type(opened) is type(model)
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(x, weights[name]) for name, x in model.named_parameters())
