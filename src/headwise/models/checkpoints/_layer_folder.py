"""Our layer by itself in a folder: the sizes that make it again, and its weights."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise._size_limits import StoredSize, limit_model_size
from headwise._tensors import read_tensors, write_tensors
from headwise.errors import UnsupportedError
from headwise.files import build_from, read_object
from headwise.layer import MultiHeadAttention, RoPE
from headwise.models.checkpoints._differences import Differences
from headwise.models.checkpoints._original import (
    ORIGINAL,
    original_heads,
    read_original,
    set_original_heads,
)

FORMAT = "headwise-layer/1"
_ABOUT, _WEIGHTS = "headwise.json", "model.safetensors"
_SIZES = ("d_model", "n_heads", "n_kv_heads", "head_dim", "v_head_dim", "kdim", "vdim")


def write_layer(layer: MultiHeadAttention, folder: Path) -> None:
    """Write a layer into a folder.

    Raises:
        UnsupportedError: it adds position biases, or its RoPE is scaled.
    """
    config = _config(layer)
    # A mean that was folded in is a bias where the others are none.
    more = asdict(Differences.between(layer, _built(config)))
    about = {"format": FORMAT, "config": config, "tensors": more["tensors"]}
    if original := original_heads(layer):
        about[ORIGINAL] = original
    (folder / _ABOUT).write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    write_tensors(layer.state_dict(), folder / _WEIGHTS)


def read_layer(folder: Path) -> MultiHeadAttention | None:
    """The layer in a folder, or None where there is none.

    Raises:
        InputError: it is broken.
    """
    path = folder / _ABOUT
    if not path.is_file():
        return None
    about = read_object(path, "load", "Save the model again.")
    if about.get("format") != FORMAT:
        return None

    def build() -> MultiHeadAttention:
        differences = Differences.read({"counts": {}} | about, str(path))
        weights = read_tensors(folder / _WEIGHTS)
        if not weights:
            raise ValueError(f"{_WEIGHTS} holds no weight")
        stored = StoredSize(len(weights), sum(x.numel() for x in weights.values()))
        # First without memory: the sizes in a file of a few bytes may be anything.
        with limit_model_size(stored, folder), torch.device("meta"):
            _check_shapes(weights, _begun(about["config"], differences))
        layer = _begun(about["config"], differences)
        set_original_heads(layer, read_original(about.get(ORIGINAL), str(path)))
        dtype = next(iter(weights.values())).dtype
        layer.to(dtype).load_state_dict(weights)
        return layer

    return build_from(build, f"load: the layer in {folder} cannot be read", "Save it again.")


def _begun(config: dict[str, Any], differences: Differences) -> MultiHeadAttention:
    layer = _built(config)
    differences.apply(layer)
    return layer


def _check_shapes(weights: dict[str, torch.Tensor], layer: MultiHeadAttention) -> None:
    wanted = layer.state_dict()
    for name in sorted(weights.keys() | wanted.keys()):
        has = tuple(weights[name].shape) if name in weights else "missing"
        needs = tuple(wanted[name].shape) if name in wanted else "not there"
        if has != needs:
            raise ValueError(f"{name} is {has} but its sizes make it {needs}")


def _config(layer: MultiHeadAttention) -> dict[str, Any]:
    core, rope = layer.attention, layer.rope
    scaled = rope is not None and rope.scaling is not None
    if layer.position_bias is not None or scaled:
        part = rope if scaled else layer.position_bias
        raise UnsupportedError(
            f"save: a layer with {type(part).__name__} that is no model's is not written down. "
            f"Keep its state_dict, and make the layer anew."
        )
    return {
        **{name: getattr(layer, name) for name in _SIZES},
        "bias": _biases(layer),
        "qk_norm": not isinstance(layer.q_norm, nn.Identity),
        "gate": layer.gate_proj is not None,
        "out_proj": not isinstance(layer.out_proj, nn.Identity),
        "rope": None if rope is None else asdict(rope),
        "sinks": _told(core.sinks),
        **{name: getattr(core, name) for name in ("dropout", "scale", "softcap", "window")},
    }


def _biases(layer: MultiHeadAttention) -> bool | str:
    # A folded mean gives the output projection a bias that the gate beside it does not have.
    outer = layer.out_proj if layer.gate_proj is None else layer.gate_proj
    inner = layer.q_proj.bias is not None
    return "qkv" if inner and getattr(outer, "bias", None) is None else inner


def _told(sinks: torch.Tensor | float | None) -> Any:
    if isinstance(sinks, nn.Parameter):
        return "learned"
    return sinks.tolist() if isinstance(sinks, torch.Tensor) else sinks


def _built(config: dict[str, Any]) -> MultiHeadAttention:
    """A layer of these sizes, its weights still to come."""
    sinks, rope = config["sinks"], config["rope"]
    if isinstance(sinks, list):
        sinks = torch.tensor(sinks)
    elif sinks == "learned":
        sinks = nn.Parameter(torch.zeros(config["n_heads"]))
    parts = {"sinks": sinks, "rope": None if rope is None else RoPE(**rope)}
    if isinstance(config["window"], list):
        parts["window"] = tuple(config["window"])
    return MultiHeadAttention(**config | parts)
