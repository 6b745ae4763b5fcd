"""Check that an argument is a model, and find the transformer in a SentenceTransformer."""

import sys
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models._compiled import without_compiler

# The transformer in a SentenceTransformer that saves it at the root of its folder.
_TRANSFORMERS = ("0.model", "0.auto_model")


def check_model(caller: str, model: Any) -> nn.Module:
    """The model itself, the transformer in a `SentenceTransformer`, or what was compiled.

    Args:
        caller: The name of the calling function, for error messages.
    Raises:
        ArgumentError: it is not a module, such as the name of a model.
        UnsupportedError: a `SentenceTransformer` does not begin with a transformer.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"{caller}: the model is {shortened(model)}. Give a module; headwise.load opens a "
            f"folder or a hub name."
        )
    model = without_compiler(model)
    if not is_sentence_transformer(model):
        return model
    return model.get_submodule(transformer_name(model, caller))


def check_weights(caller: str, model: nn.Module, *, offloaded: bool = False) -> None:
    """Refuse a model whose weights have no values here.

    Args:
        offloaded: Whether weights that accelerate loads for each call of a module will do.
    Raises:
        UnsupportedError: a weight is on the meta device.
    """
    name = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    if name is None:
        return
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise UnsupportedError(
            f"{caller}: {name} has no values: it is on the meta device. Load the weights first."
        )
    if not offloaded:
        raise UnsupportedError(
            f"{caller}: {name} is offloaded by accelerate, which loads it for each call alone. "
            f"Load the weights first: open the model without offloading."
        )


def is_sentence_transformer(model: Any) -> bool:
    """Whether a model is a `SentenceTransformer`, without importing its package."""
    # An object of this class can only exist if its package has been imported.
    cls = getattr(sys.modules.get("sentence_transformers"), "SentenceTransformer", None)
    return cls is not None and isinstance(model, cls)


def transformer_name(model: nn.Module, caller: str) -> str:
    """The name of the transformer in a `SentenceTransformer`.

    Raises:
        UnsupportedError: it does not begin with a transformer.
    """
    names = [name for name, _ in model.named_modules() if name in _TRANSFORMERS]
    if not names:
        kinds = ", ".join(type(module).__name__ for module in model.children())
        raise UnsupportedError(
            f"{caller}: this SentenceTransformer of {kinds} does not begin with a transformer. "
            f"Give the transformer inside it."
        )
    return names[0]


def model_inputs(batch: Any) -> Any:
    """A batch without the entry `modality` that a `SentenceTransformer` adds to it.

    Tensors that were made under `inference_mode` are copied outside of it, for gradients.
    """
    if isinstance(batch, Tensor):
        gradients = not torch.is_inference_mode_enabled()
        return batch.clone() if gradients and batch.is_inference() else batch
    if isinstance(batch, tuple):
        return tuple(model_inputs(part) for part in batch)
    if not isinstance(batch, Mapping):
        return batch
    no_input = ("modality",) if isinstance(batch.get("modality"), str) else ()
    read = {name: model_inputs(x) for name, x in batch.items() if name not in no_input}
    # An output of a model, such as `encoder_outputs`, is read by number too.
    return type(batch)(**read) if hasattr(batch, "to_tuple") else read
