"""Saves a Mini-GPT as JSON and safetensors, and reads it for `headwise.load`."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise._extras import require
from headwise._tensors import build_to_fit, misfits, read_tensors, write_tensors
from headwise.errors import ArgumentError, InputError
from headwise.files import build_from, files_beside, make_folder
from headwise.lab._model import MiniGPT, MiniGPTConfig

if TYPE_CHECKING:
    import tokenizers

FORMAT = "headwise/1"
Begin = Callable[[MiniGPT, Any], None]
_CONFIG, _WEIGHTS, _TOKENIZER = "headwise.json", "model.safetensors", "tokenizer.json"


def save(
    model: MiniGPT,
    folder: str | os.PathLike[str],
    *,
    tokenizer: "tokenizers.Tokenizer | None" = None,
    cut: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model and its tokenizer into a folder, which is created if it does not exist.

    The folder then holds `headwise.json` (format, architecture, sizes), `model.safetensors`
    and `tokenizer.json`. If the process is killed, it holds what it held before or all of these.

    Args:
        tokenizer: None writes no tokenizer.
        cut: The changes of a pruned model against these sizes. `read_model` applies them before
            it loads the weights.
    Raises:
        OutputError: the folder cannot be created or written.
        ArgumentError: the weights do not have the sizes of the configuration, and there is no
            `cut`.
    """
    weights = model.state_dict()
    if not cut:
        _check_sizes(model, weights)
    folder = make_folder(folder, "save")
    about = {"format": FORMAT, "architecture": "MiniGPT", "config": asdict(model.config)}
    about |= {"cut": cut} if cut else {}
    with files_beside(folder, last=_CONFIG) as new:
        write_tensors(weights, new / _WEIGHTS)
        if tokenizer is not None:
            (new / _TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        (new / _CONFIG).write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return folder


def _check_sizes(model: MiniGPT, weights: Mapping[str, Tensor]) -> None:
    with torch.device("meta"):
        expected = MiniGPT(model.config).state_dict()
    for name, shape, _ in misfits(weights, expected):
        raise ArgumentError(
            f"save: {name} is {shape}, which does not fit {model.config}; heads may have been "
            f"pruned. Save the model with headwise.save."
        )


def read_model(folder: Path, about: Mapping[str, Any], begin: Begin) -> MiniGPT:
    """Load the model of a folder, in evaluation mode.

    Args:
        about: The content of its `headwise.json`.
        begin: Called with the new model and the saved `cut`, before the weights are loaded.
    """
    sizes, path = folder / _CONFIG, folder / _WEIGHTS
    for key, known in (("format", FORMAT), ("architecture", "MiniGPT")):
        if about.get(key) != known:
            raise InputError(
                f"load: {sizes} has the {key} {about.get(key)!r}. This version reads {known!r}."
            )
    problem, advice = f"load: the sizes in {sizes} cannot be read", "Save the model again."
    config = build_from(lambda: MiniGPTConfig(**about["config"]), problem, advice)
    weights = read_tensors(path)
    if config.n_layers > len(weights):  # each layer takes memory, on the meta device too
        raise InputError(
            f"load: {sizes} has n_layers={config.n_layers}, but {path} holds {len(weights)} "
            f"tensors. Copy or save the whole folder again."
        )

    def build() -> MiniGPT:
        model = build_from(lambda: MiniGPT(config), problem, advice)
        if about.get("cut") is not None:
            begin(model, about["cut"])
        return model

    return build_to_fit(build, weights, path).eval()


def read_tokenizer(folder: Path) -> "tokenizers.Tokenizer":
    """Load the tokenizer."""
    tokenizers = require("tokenizers", "hf", "load")
    path = folder / _TOKENIZER
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(
            f"load: {path} is not a tokenizer ({error}). Copy or save it again."
        ) from error
