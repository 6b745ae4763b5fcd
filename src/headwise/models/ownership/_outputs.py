"""The floating-point outputs of a model, and whether those of two models agree."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models.ownership._example_input import run

# How far outputs may differ by rounding in another order, relative to their size.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def float_outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """The floating-point tensors that a model returns in evaluation mode, without its caches."""
    output = run(model, batch)
    values = output.values() if isinstance(output, Mapping) else output
    outputs = [values] if isinstance(values, Tensor) else list(values)
    return [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]


def differs_from_itself(model: nn.Module, batch: Any) -> bool:
    """Whether a model returns something else for the same batch, although it draws the same."""
    return bool(output_difference(float_outputs(model, batch), float_outputs(model, batch)))


def output_difference(actual: list[Tensor], expected: list[Tensor], tolerance: float = 0.0) -> str:
    """How far two lists of outputs differ, in words; empty if only by rounding.

    Args:
        tolerance: The least relative difference to allow, whatever the dtype.
    """
    for x, reference in zip(actual, expected, strict=True):
        gap = (x - reference).abs().max().item()
        size = reference.abs().max().item()
        if not gap <= max(tolerance, _TOLERANCE.get(reference.dtype, 0.0)) * max(size, 1e-6):
            return f"off by {gap:.2g} at a size of {size:.2g}"
    return ""
