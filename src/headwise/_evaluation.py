"""The evaluation mode of a model, for a block of code and nothing beyond it."""

from collections.abc import Iterator

from torch import nn

from headwise._interrupts import reversible


@reversible
def in_evaluation(*models: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode while the block runs, and in its own mode after it.

    The flags are set one by one. `train()` would turn modules on that were frozen on purpose, and
    some classes give `train()` and `eval()` side effects, such as merging an adapter.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


@reversible
def without_weight_gradients(model: nn.Module) -> Iterator[None]:
    """No weight requires a gradient while the block runs; those that did require one after it."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in trained:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)
