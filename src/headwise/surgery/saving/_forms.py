"""Write a model into an empty folder, in the form that its readers want."""

import json
from pathlib import Path
from typing import Any, Literal

from torch import nn

from headwise._tensors import output_errors
from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT
from headwise.lab import save as save_lab
from headwise.layer import MultiHeadAttention
from headwise.models import (
    ORIGINAL,
    as_stock,
    describe_changes,
    differences_of,
    original_heads,
    write_layer,
    write_remote,
)
from headwise.surgery.saving._padded import as_padded

Format = Literal["headwise", "stock", "padded", "remote-code"]


def form_of(format: Format, model: nn.Module) -> nn.Module:
    """A model as it is written: itself, or one of stock Transformers that computes the same.

    Raises:
        UnsupportedError: its class is not one of transformers or ours, or it has no such form.
    """
    if isinstance(model, MiniGPT | MultiHeadAttention):
        _check_own_class(model)
        if format != "headwise":
            raise UnsupportedError(
                f"save: Transformers knows no {type(model).__name__}, so there is none for "
                f"format={format!r}. Choose 'headwise'."
            )
        return model
    if describe_changes(model) is None or format not in ("stock", "padded"):
        return model
    return as_stock(model) if format == "stock" else as_padded(model)


def _check_own_class(model: MiniGPT | MultiHeadAttention) -> None:
    """Refuse a subclass, of which a folder holds no code.

    Raises:
        UnsupportedError: it is one.
    """
    if type(model) not in (MiniGPT, MultiHeadAttention):
        known = MiniGPT if isinstance(model, MiniGPT) else MultiHeadAttention
        raise UnsupportedError(
            f"save: {type(model).__name__} is a subclass of {known.__name__}, and load would give "
            f"a {known.__name__}. Keep its state_dict, and make the model anew."
        )


def write_as(format: Format, model: nn.Module, folder: Path) -> None:
    """Write a model into a folder; one that its configuration describes is written as it is.

    Raises:
        UnsupportedError: its class is not one of transformers, or it has no such form.
    """
    form = form_of(format, model)
    if isinstance(model, MiniGPT):
        cut = differences_of(model)
        save_lab(model, None, folder, cut=cut and cut | {ORIGINAL: original_heads(model)})
        return
    if isinstance(model, MultiHeadAttention):
        write_layer(model, folder)
        return
    about = describe_changes(model)
    if about is not None and format == "remote-code":
        write_remote(model, about, folder)
    else:
        _write(form, model, folder)
    if about is not None and format in ("headwise", "remote-code"):
        (folder / "headwise.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")


def _write(form: Any, model: Any, folder: Path) -> None:
    """Write a form of a model, which is to generate as the model does."""
    if hasattr(model, "generation_config"):
        form.generation_config = model.generation_config
    with output_errors(folder / "model.safetensors"):
        form.save_pretrained(folder)
