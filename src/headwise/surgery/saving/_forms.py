"""Write a model into an empty folder, in the form that its readers want."""

import json
from pathlib import Path
from typing import Any, Literal

from torch import nn

from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT
from headwise.lab import save as save_lab
from headwise.models import as_stock, describe_smaller, differences_of, write_remote
from headwise.surgery.saving._padded import as_padded

Format = Literal["headwise", "stock", "padded", "remote-code"]


def write_as(format: Format, model: nn.Module, folder: Path) -> None:
    """Write a model into a folder; one that its configuration describes is written as it is.

    Raises:
        UnsupportedError: its class is not one of transformers, or it has no such form.
    """
    if isinstance(model, MiniGPT):
        if format != "headwise":
            raise UnsupportedError(
                f"save: Transformers knows no MiniGPT, so there is none for format={format!r}. "
                f"Choose 'headwise'."
            )
        save_lab(model, None, folder, cut=differences_of(model))
        return
    about = describe_smaller(model)
    if about is None:
        _write(model, folder)
    elif format == "stock":
        _write(as_stock(model), folder)
    elif format == "padded":
        _write(as_padded(model), folder)
    else:
        if format == "headwise":
            _write(model, folder)
        else:
            write_remote(model, about, folder)
        (folder / "headwise.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")


def _write(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
