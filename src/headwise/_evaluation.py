"""Contexts that put a model in evaluation mode and restore its own flags afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from headwise.errors import UnsupportedError


@contextmanager
def in_evaluation(*models: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and restore its own mode when the block ends.

    The flags are set one by one. `train()` would enable training mode in submodules that were
    frozen on purpose, and some classes give `train()` and `eval()` side effects, such as merging
    an adapter.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def differentiable_evaluation(model: nn.Module, *, weights: bool) -> Iterator[None]:
    """Evaluation mode with autograd enabled, also inside `no_grad` or `inference_mode`.

    Args:
        weights: Whether weights keep their own `requires_grad`. With False no weight requires a
            gradient inside the block; gates and inputs still can.
    """
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.is_inference():
            raise UnsupportedError(
                f"gradients: {name} was made under torch.inference_mode(), so that no gradient can "
                f"reach it. Make or load the model outside of inference_mode."
            )
    frozen = [] if weights else [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad_(False)
        with in_evaluation(model), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for weight in frozen:
            weight.requires_grad_(True)
