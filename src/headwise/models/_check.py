"""What every function checks first: whether it has a model, and which transformer is in it."""

import sys
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

from torch import nn

from headwise.errors import ArgumentError, UnsupportedError

# The name of the transformer in a SentenceTransformer that saves it at the root of its folder.
_AT_ROOT = ("0.model", "0.auto_model")


def check_model(who: str, model: Any) -> nn.Module:
    """The model to work on: the one that was given, or the transformer in a `SentenceTransformer`.

    Args:
        who: The function that was given it.
    Raises:
        ArgumentError: it is no module, such as the name of a model.
        UnsupportedError: a `SentenceTransformer` does not begin with a transformer.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"{who}: the model is {shortened(model)}. Give a module; headwise.load opens a folder "
            f"or a hub name."
        )
    return model.get_submodule(place_of(model, who)) if is_sentence_transformer(model) else model


def is_sentence_transformer(model: Any) -> bool:
    """Whether a model is a `SentenceTransformer`, without importing its package."""
    # An object of this class exists only where its package was imported.
    cls = getattr(sys.modules.get("sentence_transformers"), "SentenceTransformer", None)
    return cls is not None and isinstance(model, cls)


def place_of(model: nn.Module, who: str) -> str:
    """The name of the transformer in a `SentenceTransformer`.

    Raises:
        UnsupportedError: it does not begin with one.
    """
    names = [name for name, _ in model.named_modules() if name in _AT_ROOT]
    if not names:
        kinds = ", ".join(type(module).__name__ for module in model.children())
        raise UnsupportedError(
            f"{who}: this SentenceTransformer of {kinds} does not begin with a transformer. Give "
            f"the transformer inside it."
        )
    return names[0]


def model_inputs(batch: Any) -> Any:
    """A batch without the note on its modality that a `SentenceTransformer` adds to it."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("modality"), str):
        return batch
    return {name: value for name, value in batch.items() if name != "modality"}
