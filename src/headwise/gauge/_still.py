"""A model held still while its heads are weighed, and given back as it was."""

from collections.abc import Iterator

from torch import nn

from headwise._interrupts import reversible


@reversible
def held_still(model: nn.Module) -> Iterator[None]:
    """In evaluation mode and without gradients of weights, whatever happens in the block."""
    training = [module for module in model.modules() if module.training]
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    model.eval()
    for weight in learning:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in learning:
            weight.requires_grad_(True)
        # One by one: train() would also turn those on that were frozen on purpose.
        for module in training:
            module.training = True
