"""Write a model into an empty folder in one of the formats."""

import json
from pathlib import Path
from typing import Any, Literal

from torch import nn

from headwise._tensors import output_errors
from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT
from headwise.lab import save as save_lab
from headwise.layer import MultiHeadAttention
from headwise.models.checkpoints._original_heads import ORIGINAL, original_heads
from headwise.models.checkpoints._torch_layer import TorchCompatibleAttention
from headwise.models.checkpoints.formats._changes import describe_changes, differences_of
from headwise.models.checkpoints.formats._layer_folder import write_layer
from headwise.models.checkpoints.formats._padded import as_padded
from headwise.models.checkpoints.formats._remote_code import write_remote
from headwise.models.checkpoints.formats._stock import as_stock
from headwise.models.ownership import example_input

Format = Literal["headwise", "stock", "padded", "remote-code"]


def as_format(format: Format, model: nn.Module, batch: Any = None) -> nn.Module:
    """The model whose weights a format stores: itself, or an equal one of stock Transformers.

    Args:
        batch: An input to run it on; None is a short made-up one.
    Raises:
        UnsupportedError: its class is neither one of transformers nor ours, or it cannot be
            expressed in the format.
    """
    if isinstance(model, MiniGPT | MultiHeadAttention):
        _check_own_class(model)
        if format != "headwise":
            raise UnsupportedError(
                f"save: Transformers has no {type(model).__name__}, so format={format!r} does not "
                f"exist for it. Choose 'headwise'."
            )
        return model
    if describe_changes(model) is None or format == "headwise":
        return model
    for name, module in model.named_modules():
        if isinstance(module, TorchCompatibleAttention):
            raise UnsupportedError(
                f"save: {name} replaces a layer of torch, which Transformers alone cannot build "
                f"with fewer heads. Choose the format 'headwise', or prune other layers."
            )
    if format == "remote-code":
        return model
    batch = example_input(model) if batch is None else batch
    return as_stock(model, batch) if format == "stock" else as_padded(model, batch)


def write_format(format: Format, model: nn.Module, folder: Path, batch: Any = None) -> None:
    """Write a model into a folder; one that its configuration describes is written unchanged.

    Raises:
        UnsupportedError: its class is not one of transformers, or it cannot be expressed in the
            format.
    """
    converted = as_format(format, model, batch)
    if isinstance(model, MiniGPT):
        cut = differences_of(model)
        save_lab(model, None, folder, cut=cut and cut | {ORIGINAL: original_heads(model)})
        return
    if isinstance(model, MultiHeadAttention):
        write_layer(model, folder)
        return
    changes = describe_changes(model)
    if changes is not None and format == "remote-code":
        write_remote(model, changes, folder)
    else:
        _write(converted, model, folder)
    if changes is not None and format in ("headwise", "remote-code"):
        (folder / "headwise.json").write_text(json.dumps(changes, indent=1) + "\n", "utf-8")


def _check_own_class(model: MiniGPT | MultiHeadAttention) -> None:
    """Refuse a subclass, because a folder holds no code.

    Raises:
        UnsupportedError: it is one.
    """
    if type(model) not in (MiniGPT, MultiHeadAttention):
        base = MiniGPT if isinstance(model, MiniGPT) else MultiHeadAttention
        raise UnsupportedError(
            f"save: {type(model).__name__} is a subclass of {base.__name__}, and load would give "
            f"a {base.__name__}. Keep its state_dict, and build the model again."
        )


def _write(converted: Any, model: Any, folder: Path) -> None:
    """Write a converted model with the generation settings of the original one."""
    if hasattr(model, "generation_config"):
        converted.generation_config = model.generation_config
    with output_errors(folder / "model.safetensors"):
        converted.save_pretrained(folder)
