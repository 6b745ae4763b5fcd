"""Our layer by itself in a folder: its sizes as JSON, and its weights."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise._size_limits import StoredSize, limit_model_size
from headwise._tensors import read_tensors, write_tensors
from headwise.errors import UnsupportedError
from headwise.files import build_from
from headwise.layer import MultiHeadAttention, RoPE
from headwise.models.checkpoints._changes import MANIFEST, Differences
from headwise.models.checkpoints._original_heads import (
    ORIGINAL,
    original_heads,
    read_original,
    set_original_heads,
)

# The format of the manifest of a layer by itself.
LAYER = "headwise-layer/1"
_WEIGHTS = "model.safetensors"
_SIZES = ("d_model", "n_heads", "n_kv_heads", "head_dim", "v_head_dim", "kdim", "vdim")


def write_layer(layer: MultiHeadAttention, folder: Path) -> None:
    """Write a layer into a folder.

    Raises:
        UnsupportedError: it adds position biases, or its RoPE is scaled.
    """
    config = _config(layer)
    # A folded mean gives the output projection a bias that its sizes do not mention.
    changes = asdict(Differences.between(layer, _build(config)))
    content = {"format": LAYER, "config": config, "tensors": changes["tensors"]}
    if original := original_heads(layer):
        content[ORIGINAL] = original
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    write_tensors(layer.state_dict(), folder / _WEIGHTS)


def read_layer(folder: Path, manifest: dict[str, Any]) -> MultiHeadAttention:
    """The layer that `write_layer` wrote into a folder."""
    path = str(folder / MANIFEST)

    def build() -> MultiHeadAttention:
        differences = Differences.read({"counts": {}} | manifest, path)
        weights = read_tensors(folder / _WEIGHTS)
        if not weights:
            raise ValueError(f"{_WEIGHTS} holds no weight")
        stored = StoredSize(len(weights), sum(x.numel() for x in weights.values()))
        # First on the meta device: a damaged file may hold sizes of any magnitude.
        with limit_model_size(stored, folder), torch.device("meta"):
            _check_shapes(weights, _build_changed(manifest["config"], differences))
        layer = _build_changed(manifest["config"], differences)
        set_original_heads(layer, read_original(manifest.get(ORIGINAL), path))
        dtype = next(iter(weights.values())).dtype
        layer.to(dtype).load_state_dict(weights)
        return layer

    return build_from(build, f"load: the layer in {folder} cannot be read", "Save it again.")


def _build_changed(config: dict[str, Any], differences: Differences) -> MultiHeadAttention:
    layer = _build(config)
    differences.apply(layer)
    return layer


def _check_shapes(weights: dict[str, torch.Tensor], layer: MultiHeadAttention) -> None:
    expected = layer.state_dict()
    for name in sorted(weights.keys() | expected.keys()):
        shape = tuple(weights[name].shape) if name in weights else "missing"
        needed = tuple(expected[name].shape) if name in expected else "not there"
        if shape != needed:
            raise ValueError(f"{name} is {shape} but its sizes make it {needed}")


def _config(layer: MultiHeadAttention) -> dict[str, Any]:
    core, rope = layer.attention, layer.rope
    scaled = rope is not None and rope.scaling is not None
    if layer.position_bias is not None or scaled:
        part = rope if scaled else layer.position_bias
        raise UnsupportedError(
            f"save: a layer with {type(part).__name__} can only be saved in a model. Keep its "
            f"state_dict, and build the layer again."
        )
    return {
        **{name: getattr(layer, name) for name in _SIZES},
        "bias": _biases(layer),
        "qk_norm": not isinstance(layer.q_norm, nn.Identity),
        "gate": layer.gate_proj is not None,
        "out_proj": not isinstance(layer.out_proj, nn.Identity),
        "rope": None if rope is None else asdict(rope),
        "sinks": _sinks(core.sinks),
        **{name: getattr(core, name) for name in ("dropout", "scale", "softcap", "window")},
    }


def _biases(layer: MultiHeadAttention) -> bool | str:
    # A folded mean gives the output projection a bias that the gate beside it does not have.
    outer = layer.out_proj if layer.gate_proj is None else layer.gate_proj
    inner = layer.q_proj.bias is not None
    return "qkv" if inner and getattr(outer, "bias", None) is None else inner


def _sinks(sinks: torch.Tensor | float | None) -> Any:
    if isinstance(sinks, nn.Parameter):
        return "learned"
    return sinks.tolist() if isinstance(sinks, torch.Tensor) else sinks


def _build(config: dict[str, Any]) -> MultiHeadAttention:
    """A layer of these sizes, before its weights are loaded."""
    sinks, rope = config["sinks"], config["rope"]
    if isinstance(sinks, list):
        sinks = torch.tensor(sinks)
    elif sinks == "learned":
        sinks = nn.Parameter(torch.zeros(config["n_heads"]))
    values = {"sinks": sinks, "rope": None if rope is None else RoPE(**rope)}
    if isinstance(config["window"], list):
        values["window"] = tuple(config["window"])
    return MultiHeadAttention(**config | values)
