"""Models as the options of a command ask for them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.cli._options import Shared
from headwise.models import (
    check_device,
    load,
    load_tokenizer,
)
from headwise.models.texts import check_reads_text


def open_model(name: str, shared: Shared, text_for: str | None = None) -> tuple[nn.Module, Any]:
    """The model on the requested device, and its tokenizer.

    Args:
        text_for: The function for which the model must read text. Models that do not read text
            have no tokenizer, or only one for their labels.
    """
    device = check_device(shared.device or "cpu", "--device")
    dtype = None if shared.dtype is None else getattr(torch, shared.dtype)
    model = load(name, device=device, dtype=dtype, attn_implementation=shared.attention)
    if text_for is not None:
        check_reads_text(text_for, model)
    return model, load_tokenizer(name)


def title_of(model: str) -> str:
    """A hub name as it is; for a folder its last two names, as many are called `hf` or `model`."""
    folder = Path(model)
    return str(Path(*folder.resolve().parts[-2:])) if folder.is_dir() else model


def count_parameters(model: nn.Module) -> float:
    """The number of parameters of a model."""
    return float(sum(weight.numel() for weight in model.parameters()))
