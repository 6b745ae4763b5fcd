"""`per_layer_config`: the part of a configuration that says how single layers differ.

Transformers 5.14 and later reads it, and few of its models apply it yet: others raise when they
look up a number that layers may differ in. Such a model is built here from its folder.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError
from headwise.files import read_object
from headwise.models.checkpoints._manifest import (
    Changes,
    changed_class,
    differences_between,
    transformers_class,
)

PER_LAYER = "per_layer_config"
# The switch of Transformers that lets a number be read that layers differ in. Without it a
# configuration with the entry cannot be opened where the model does not apply the entry.
_READABLE = "allow_global_per_layer_attribute_access"
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
_KNOWN = (_HEADS, _KV_HEADS, "intermediate_size")
Limit = Callable[[], AbstractContextManager[None]]


def layers_of(model: Any) -> dict[str, dict[str, int]]:
    """The numbers of heads of the layers that differ from the configuration of a model.

    Empty where no entry could describe them: the model has other layers than one stack of
    projections of queries, keys and values, its configuration ties the width of a head to their
    number, or it has such an entry already, which stays as it is.
    """
    config = model.config
    if getattr(config, "is_heterogeneous", False):
        return {}
    head_dim = getattr(config, "head_dim", None)
    names = [name for name in (_HEADS, _KV_HEADS) if isinstance(getattr(config, name, None), int)]
    layers = {}
    for _, number, layer in _layers(model):
        attention: Any = getattr(layer, "self_attn", None)
        if head_dim is None or not hasattr(attention, "q_proj") or not hasattr(attention, "k_proj"):
            return {}
        projections = {_HEADS: attention.q_proj, _KV_HEADS: attention.k_proj}
        counts = {name: projections[name].weight.shape[0] // head_dim for name in names}
        if any(getattr(config, name) != count for name, count in counts.items()):
            layers[str(number)] = counts
    return layers


def write_layers(layers: Mapping[str, Any], cls: type, folder: Path) -> None:
    """Add `per_layer_config` to the configuration in a folder, which still opens with it."""
    path = folder / "config.json"
    content = json.loads(path.read_text("utf-8")) | {PER_LAYER: layers}
    if not applies(cls, content):
        content[_READABLE] = True
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def applies(cls: Any, content: Mapping[str, Any], limit: Limit = nullcontext) -> bool:
    """Whether Transformers builds each layer as `per_layer_config` says.

    Models that do not apply it raise, except for `skip`: no model looks that up yet.
    """
    try:
        config = cls.config_class.from_dict(dict(content))
        if not getattr(config, "is_heterogeneous", False):
            return False  # before 5.14: read as any unknown entry, and without effect
        if any("skip" in overrides for overrides in content[PER_LAYER].values()):
            return False
        _sketch(cls, config, limit)
    except Exception:  # configurations raise any exception
        return False
    return True


def read_layers(folder: Path, cls: Any, limit: Limit) -> tuple[Any, Any]:
    """The configuration without `per_layer_config`, and a class that builds what that says.

    Args:
        cls: The class of a manifest, which says in more detail how layers differ; or None.
        limit: Stops a model that is far larger than its weight files.
    Returns:
        None and `cls` if the folder has no such entry, or Transformers applies it.
    Raises:
        InputError: it changes something other than numbers of heads and widths of MLPs.
    """
    path = folder / "config.json"
    content = read_object(path, "load", "Save the model again.") if path.is_file() else {}
    layers = content.pop(PER_LAYER, None)
    content.pop(_READABLE, None)
    name = next(iter(content.get("architectures") or ()), None)
    if not layers or not isinstance(name, str):
        return None, cls
    base = cls or transformers_class(name, folder)
    if applies(base, content | {PER_LAYER: layers}, limit):
        return None, cls
    config = base.config_class.from_dict(content)
    if cls is None:
        changes = _changes_of(_checked(layers, config, path), base, config, limit)
        cls = changed_class({"architecture": name, **changes}, folder)
    return config, cls


def _changes_of(layers: Mapping[int, Any], cls: Any, config: Any, limit: Limit) -> Changes:
    """What layers of other numbers change in the model that a configuration builds."""
    built = _sketch(cls, config, limit)
    changes: Changes = {"tensors": {}, "counts": {}, "heads": {}}
    # A whole model is built for the numbers of a layer, and once for all layers with the same.
    for overrides in {json.dumps(x, sort_keys=True): x for x in layers.values()}.values():
        variant = copy(config)
        # Set afterwards: the checks of a configuration refuse heads that do not divide its width.
        for name, count in overrides.items():
            setattr(variant, name, count)
        differing = differences_between(_sketch(cls, variant, limit), built)
        prefixes = tuple(
            f"{name}." for name, number, _ in _layers(built) if layers.get(number) == overrides
        )
        for part, entries in differing.items():
            inside = {name: x for name, x in entries.items() if name.startswith(prefixes)}
            changes[part] |= inside
    changes["tensors"] = {name: [*shape] for name, shape in changes["tensors"].items()}
    return changes


def _checked(layers: Any, config: Any, path: Path) -> dict[int, dict[str, int]]:
    checked = {}
    for key, overrides in layers.items() if isinstance(layers, dict) else [("", layers)]:
        number = int(key) if re.fullmatch("[0-9]{1,9}", key) else -1
        if not 0 <= number < config.num_hidden_layers or not isinstance(overrides, dict):
            raise InputError(
                f"load: {path} has the entry {key[:80]!r} in {PER_LAYER}, which is no layer of its "
                f"{config.num_hidden_layers}. Save the model again."
            )
        for name, count in overrides.items():
            if name not in _KNOWN or type(count) is not int or count < 1:
                raise InputError(
                    f"load: {path} sets {name:.80} of layer {number} to {count!r:.80}, and only "
                    f"numbers for {', '.join(_KNOWN)} are applied. Open it with a Transformers "
                    f"that builds such a model."
                )
        heads, kv_heads = (
            overrides.get(name) or getattr(config, name, None) or 1 for name in (_HEADS, _KV_HEADS)
        )
        if heads % kv_heads:
            raise InputError(
                f"load: {path} gives layer {number} {heads} heads and {kv_heads} kv heads, which "
                f"cannot share them evenly. Save the model again."
            )
        checked[number] = overrides
    return checked


def _sketch(cls: Any, config: Any, limit: Limit) -> nn.Module:
    """The model of a configuration, without memory for its weights."""
    with limit(), torch.device("meta"):
        built: nn.Module = cls(config)
    return built


def _layers(model: nn.Module) -> Iterator[tuple[str, int, nn.Module]]:
    """The name, number and module of each layer, in the one list of so many modules."""
    n_layers = getattr(model.config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            for number, layer in enumerate(module):
                yield f"{name}.{number}", number, layer
            return
