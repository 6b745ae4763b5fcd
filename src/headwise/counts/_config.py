"""The sizes that a `config.json` tells, whatever its architecture calls them."""

import os
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

from headwise._count_names import HEADS, KV_HEADS
from headwise.counts._families import FAMILIES, LEFT_OUT
from headwise.counts._model import ModelSizes
from headwise.counts._sizes import layer_sizes
from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.files import read_json

_FILES = ("config.json", "headwise.json")
_NAMES = {
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_heads": (*HEADS, "attention_heads"),
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "n_kv_heads": KV_HEADS,
    "head_dim": ("head_dim",),
}
_REFUSED = {
    "kv_lora_rank": "its keys and values come from a latent (MLA), not from a matrix each",
    "is_encoder_decoder": "it has an encoder, a decoder and attention between them",
    "add_cross_attention": "it has attention to an encoder beside its own",
    "pruned_heads": "its layers have lost heads of their own",
    "cut": "its layers have lost heads of their own",
    "num_hidden_groups": "its layers share their weights",
}
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


class _Config(NamedTuple):
    path: Path
    held: Mapping[str, Any]
    part: str = ""  # which object within the file, where it is not all of it


def read_config(path: str | os.PathLike[str]) -> ModelSizes:
    """Read the sizes of a model's attention from its `config.json`, or from a folder with one.

    Hugging Face's files are understood, and those of our own checkpoints. Only the file is read:
    no weight, and no code. Of a model of text and images the text's attention is counted, and
    `source` says so. A size that a file leaves out is the default of its family.

    A file seldom says which projections have a bias, and never that there are others beside them,
    so only families are counted whose own models the count was held to.

    Raises:
        InputError: the file is missing or not JSON, or a size is missing or not a number.
        UnsupportedError: the family is not known; the layers are not all of one size, share
            weights, lost heads, or make keys and values in another way; there is an encoder to
            attend to; or some layers are not attention.
        ShapeError: its sizes make no layer.
    """
    config = _read(Path(path))
    for name, why in _REFUSED.items():
        if config.held.get(name):
            raise UnsupportedError(
                f"count: {config.path} has {name}={config.held[name]}: {why}, so one layer's "
                f"sizes do not tell what it costs. Count its layers with --d-model and --heads."
            )
    _check_layers(config)
    try:
        sizes = layer_sizes(
            _need(config, "d_model"),
            _need(config, "n_heads"),
            _kv_heads(config),
            head_dim=_size(config, "head_dim"),
            biases=_biases(config),
        )
    except ShapeError as error:
        told = str(error).removeprefix("layer_sizes: ")
        raise ShapeError(f"count: {config.path} makes no layer: {told}") from error
    name = config.path.parent.resolve().name
    return ModelSizes(name, sizes, _need(config, "n_layers"), source=f"{config.path}{config.part}")


def _read(path: Path) -> _Config:
    if path.is_dir():
        found = [path / name for name in _FILES if (path / name).is_file()]
        if not found:
            raise InputError(f"count: {path} has no config.json. Name a folder with a model.")
        path = found[0]
    held = read_json(path, "count", "Name a config.json, or its folder.")
    if not isinstance(held, dict):
        raise InputError(f"count: {path} holds {brief(held)}. Name a config.json.")
    ours = path.name == "headwise.json"
    if not ours and path.with_name("headwise.json").is_file():
        raise UnsupportedError(
            f"count: {path} has a headwise.json beside it, which tells what was cut, so its sizes "
            f"are not those of the model. Count its layers with --d-model and --heads."
        )
    # A model of text and images has the sizes of each part in an object of its own.
    inner = held.get("config" if ours else "text_config")
    part = "" if ours or not isinstance(inner, dict) else ", its text_config alone"
    outer, held = held, inner if isinstance(inner, dict) else held
    if ours:
        return _Config(path, held | {"model_type": "headwise", "cut": outer.get("cut")})
    return _Config(path, {**LEFT_OUT.get(str(held.get("model_type")), {}), **held}, part)


def _check_layers(config: _Config) -> None:
    """Refuse layers that mix tokens in another way than by attention."""
    kinds = config.held.get("layer_types") or config.held.get("layers_block_type") or []
    kinds = kinds if isinstance(kinds, list) else [kinds]
    other = sorted({str(kind) for kind in kinds} - set(_ATTENTION))
    if other:
        raise UnsupportedError(
            f"count: {config.path} has layers of the kind {', '.join(other)}, which we cannot "
            f"count. Count the others with --d-model and --heads."
        )


def _size(config: _Config, size: str) -> int | None:
    """A size, by the first of its names; None where none stands there, or null."""
    for name in _NAMES[size]:
        value = config.held.get(name)
        if isinstance(value, list):
            raise UnsupportedError(
                f"count: {config.path} has {name}={brief(value)}, so its layers differ. "
                f"Count each with --d-model and --heads."
            )
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(
                f"count: {config.path} has {name}={brief(value)}. Give a positive whole number."
            )
        if value is not None:
            return value
    return None


def _need(config: _Config, size: str) -> int:
    value = _size(config, size)
    if value is None:
        raise InputError(
            f"count: {config.path} has none of {', '.join(_NAMES[size])}. Add one of them."
        )
    return value


def _kv_heads(config: _Config) -> int | None:
    # Falcon's first models and StarCoder say it like this; Falcon's later ones give the number.
    shared = config.held.get("multi_query")
    if shared is not None and not config.held.get("new_decoder_architecture"):
        return 1 if shared else None
    return _size(config, "n_kv_heads")


def _biases(config: _Config) -> str:
    """The roles with a bias, in the family of the model."""
    family = str(config.held.get("model_type"))
    if family not in FAMILIES:
        raise UnsupportedError(
            f"count: {config.path} has model_type={family}, a family whose projections we "
            f"do not know. Name one with the same, such as llama or bert, or give its sizes by "
            f"--d-model, --heads and --biases."
        )
    rule = FAMILIES[family]
    on = rule.switch is not None and config.held.get(rule.switch, rule.default)
    if not isinstance(on, bool):
        raise InputError(f"count: {config.path} has {rule.switch}={brief(on)}. Say true or false.")
    return rule.always + (rule.switched if on else "")
