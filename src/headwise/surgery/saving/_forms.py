"""Write a model into an empty folder, in the form that its readers want."""

import json
from pathlib import Path
from typing import Any, Literal

from torch import nn

from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT
from headwise.lab import save as save_lab
from headwise.layer import MultiHeadAttention
from headwise.models import as_stock, describe_smaller, differences_of, write_layer, write_remote
from headwise.surgery.saving._padded import as_padded

Format = Literal["headwise", "stock", "padded", "remote-code"]


def write_as(format: Format, model: nn.Module, folder: Path) -> None:
    """Write a model into a folder; one that its configuration describes is written as it is.

    Raises:
        UnsupportedError: its class is not one of transformers, or it has no such form.
    """
    if isinstance(model, MiniGPT | MultiHeadAttention):
        _write_ours(format, model, folder)
        return
    about = describe_smaller(model)
    if about is None:
        _write(model, model, folder)
    elif format == "stock":
        _write(as_stock(model), model, folder)
    elif format == "padded":
        _write(as_padded(model), model, folder)
    else:
        if format == "headwise":
            _write(model, model, folder)
        else:
            write_remote(model, about, folder)
        (folder / "headwise.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")


def _write(form: Any, model: Any, folder: Path) -> None:
    """Write a form of a model, which is to generate as the model does."""
    if hasattr(model, "generation_config"):
        form.generation_config = model.generation_config
    form.save_pretrained(folder)


def _write_ours(format: Format, model: MiniGPT | MultiHeadAttention, folder: Path) -> None:
    if format != "headwise":
        raise UnsupportedError(
            f"save: Transformers knows no {type(model).__name__}, so there is none for "
            f"format={format!r}. Choose 'headwise'."
        )
    if isinstance(model, MiniGPT):
        save_lab(model, None, folder, cut=differences_of(model))
    else:
        write_layer(model, folder)
