"""Read attention sizes from a `config.json`, under the names that its architecture uses."""

import os
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

from headwise._count_names import CONFIG_HEADS, KV_HEADS
from headwise.counts._families import ENCODERS, FAMILIES, OMITTED
from headwise.counts._sizes import ModelSizes, layer_sizes
from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.files import as_path, read_json

_FILE_NAMES = ("config.json", "headwise.json")
_NAMES = {
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_heads": CONFIG_HEADS,
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "n_kv_heads": KV_HEADS,
    "head_dim": ("head_dim",),
}
_REFUSED = {
    "kv_lora_rank": "its keys and values come from a latent (MLA), not from matrices of their own",
    "is_encoder_decoder": "it has an encoder, a decoder and attention between them",
    "add_cross_attention": "it has attention to an encoder besides self-attention",
    "pruned_heads": "heads were removed from some of its layers",
    "cut": "heads were removed from some of its layers",
    "num_hidden_groups": "its layers share their weights",
}
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


class _Config(NamedTuple):
    path: Path
    fields: Mapping[str, Any]
    part: str = ""  # which object of the file holds the sizes, if not the whole file


def read_config(path: str | os.PathLike[str]) -> ModelSizes:
    """Read the sizes of a model's attention from its `config.json`, or from a folder with one.

    The file may come from Hugging Face or from one of our own checkpoints. Nothing else is read:
    no weights, and no code. For a model of text and images, the sizes are those of its text
    attention, and `source` says so. A size that the file omits is the default of its family.

    A file seldom says which projections have a bias, and never whether there are further
    projections. So only families are supported whose counts are tested against real models.

    Raises:
        InputError: the file is missing or not JSON, or a size is missing or not a number.
        UnsupportedError: the family is unknown; the layers differ in size, share weights, have
            had heads removed, or compute keys and values in another way; there is
            cross-attention to an encoder; or some layers are not attention.
        ShapeError: the sizes do not fit together.
    """
    config = _read(as_path("read_config", path))
    _check_layers(config)
    # Falcon's first models and StarCoder use this flag; later Falcons have the number.
    shared = config.fields.get("multi_query")
    has_flag = shared is not None and not config.fields.get("new_decoder_architecture")
    kv_heads = (1 if shared else None) if has_flag else _size(config, "n_kv_heads")
    needed: dict[str, int] = {}
    for size in ("d_model", "n_heads", "n_layers"):
        if (value := _size(config, size)) is None:
            names = ", ".join(_NAMES[size])
            raise InputError(f"count: {config.path} has none of {names}. Add one of them.")
        needed[size] = value
    try:
        sizes = layer_sizes(
            needed["d_model"], needed["n_heads"], kv_heads,
            head_dim=_size(config, "head_dim"), biases=_biases(config),
        )  # fmt: skip
    except ShapeError as error:
        message = str(error).removeprefix("layer_sizes: ")
        raise ShapeError(f"count: {config.path} has sizes that do not fit: {message}") from error
    name = config.path.parent.resolve().name
    is_encoder = config.fields.get("model_type") in ENCODERS and not config.fields.get("is_decoder")
    return ModelSizes(
        name, sizes, needed["n_layers"], source=f"{config.path}{config.part}",
        has_cache=not is_encoder,
    )  # fmt: skip


def _read(path: Path) -> _Config:
    if path.is_dir():
        files = [path / name for name in _FILE_NAMES if (path / name).is_file()]
        if not files:
            raise InputError(f"count: {path} has no config.json. Name a folder with a model.")
        path = files[0]
    content = read_json(path, "count", "Name a config.json, or its folder.")
    if not isinstance(content, dict):
        raise InputError(f"count: {path} holds {brief(content)}. Name a config.json.")
    ours = path.name == "headwise.json"
    if not ours and path.with_name("headwise.json").is_file():
        raise UnsupportedError(
            f"count: {path} has a headwise.json beside it, which lists removed heads, so its sizes "
            f"are not those of the model. Count its layers with --d-model and --heads."
        )
    # A model of text and images has a separate object for the sizes of each part.
    inner = content.get("config" if ours else "text_config")
    part = "" if ours or not isinstance(inner, dict) else ", its text_config alone"
    fields = inner if isinstance(inner, dict) else content
    if ours:
        return _Config(path, fields | {"model_type": "headwise", "cut": content.get("cut")})
    return _Config(path, {**OMITTED.get(str(fields.get("model_type")), {}), **fields}, part)


def _check_layers(config: _Config) -> None:
    """Refuse layers that mix tokens by something other than attention of their own heads."""
    for name, reason in _REFUSED.items():
        if config.fields.get(name):
            raise UnsupportedError(
                f"count: {config.path} has {name}={config.fields[name]}: {reason}, so the "
                f"sizes of one layer are not enough. Count its layers with --d-model and --heads."
            )
    kinds = config.fields.get("layer_types") or config.fields.get("layers_block_type") or []
    kinds = kinds if isinstance(kinds, list) else [kinds]
    unsupported = sorted({str(kind) for kind in kinds} - set(_ATTENTION))
    if unsupported:
        raise UnsupportedError(
            f"count: {config.path} has layers of the kind {', '.join(unsupported)}, which cannot "
            f"be counted. Count the others with --d-model and --heads."
        )


def _size(config: _Config, size: str) -> int | None:
    """A size under the first of its names that is set; None where none is."""
    named = ((name, config.fields.get(name)) for name in _NAMES[size])
    name, value = next((pair for pair in named if pair[1] is not None), ("", None))
    if isinstance(value, list):
        raise UnsupportedError(
            f"count: {config.path} has {name}={brief(value)}, so its layers differ. "
            f"Count each with --d-model and --heads."
        )
    if value is not None and (type(value) is not int or value < 1):
        raise InputError(
            f"count: {config.path} has {name}={brief(value)}. Give a positive whole number."
        )
    return value


def _biases(config: _Config) -> str:
    """The roles with a bias, in the family of the model."""
    family = str(config.fields.get("model_type"))
    if family not in FAMILIES:
        raise UnsupportedError(
            f"count: {config.path} has model_type={family}, a family whose projections are "
            f"unknown. Name a family with the same projections, such as llama or bert, or give its "
            f"sizes by --d-model, --heads and --biases."
        )
    biases = FAMILIES[family]
    switch = biases.switch is not None and config.fields.get(biases.switch, biases.default)
    if not isinstance(switch, bool):
        raise InputError(
            f"count: {config.path} has {biases.switch}={brief(switch)}. Use true or false."
        )
    return biases.always + (biases.switched if switch else "")
