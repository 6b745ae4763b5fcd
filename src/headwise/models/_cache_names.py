"""What the models of transformers call their cache of keys and values."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

# Transformers 5.24 renamed the argument and the output; until 5.40 callers may write either.
_NAMES = ("cache", "past_key_values")


def cache_in(values: Mapping[str, Any]) -> Any:
    """The cache among the arguments or the outputs of a forward pass, or None."""
    return next((values[name] for name in _NAMES if values.get(name) is not None), None)


def cache_argument(model: nn.Module) -> str | None:
    """The argument of a model's forward pass that takes its cache, or None."""
    arguments = inspect.signature(model.forward).parameters
    return next((name for name in _NAMES if name in arguments), None)
