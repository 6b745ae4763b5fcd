"""The answer of a model as numbers, and whether two models give the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models import call_model, in_evaluation

# How far answers may lie apart by rounding in another order, as a share of their size.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@torch.no_grad()
def answer_of(model: nn.Module, batch: Any) -> list[Tensor]:
    """All numbers that a model answers in evaluation mode; caches and the like left out."""
    with in_evaluation(model):
        output = call_model(model, batch)
    values = output.values() if isinstance(output, Mapping) else output
    found = [values] if isinstance(values, Tensor) else list(values)
    return [x for x in found if isinstance(x, Tensor) and x.is_floating_point()]


def difference(found: list[Tensor], wanted: list[Tensor], least: float = 0.0) -> str:
    """How far two answers lie apart, in words; empty if they are the same but for rounding.

    Args:
        least: The share of their size by which answers of any dtype may lie apart.
    """
    for one, two in zip(found, wanted, strict=True):
        gap = (one - two).abs().max().item()
        size = two.abs().max().item()
        if not gap <= max(least, _TOLERANCE.get(two.dtype, 0.0)) * max(size, 1e-6):
            return f"off by {gap:.2g} at a size of {size:.2g}"
    return ""
