"""What every door asks first: whether it was given a model at all."""

from reprlib import repr as shortened
from typing import Any

from torch import nn

from headwise.errors import ArgumentError


def check_model(who: str, model: Any) -> None:
    """Refuse what is no module, such as the name of a model.

    Args:
        who: The function that was given it.
    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"{who}: the model is {shortened(model)}. Give a module; headwise.load opens a folder "
            f"or a hub name."
        )
