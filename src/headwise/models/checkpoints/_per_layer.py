"""`per_layer_config`: the part of a configuration that says how single layers differ.

Transformers 5.14 and later reads it, and few of its models apply it yet: others raise when they
look up a number that layers may differ in. Such a model is built here from its folder.
"""

import json
from collections.abc import Iterator, Mapping
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
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
_KNOWN = (_HEADS, _KV_HEADS, "intermediate_size")


def layers_of(model: Any) -> dict[str, dict[str, int]]:
    """The numbers of heads of the layers that differ from the configuration of a model.

    Empty where no entry could describe them: the model has other layers than one stack of
    projections of queries, keys and values, or its configuration ties the width of a head to their
    number.
    """
    config = model.config
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
    """Add `per_layer_config` to the configuration in a folder, if this Transformers applies it.

    Elsewhere the entry would make a configuration that opens into one that does not.
    """
    path = folder / "config.json"
    content = json.loads(path.read_text("utf-8")) | {PER_LAYER: layers}
    if layers and applies(cls, content):
        path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def applies(cls: Any, content: Mapping[str, Any]) -> bool:
    """Whether Transformers builds each layer as `per_layer_config` says.

    Models that do not apply it raise, except for `skip`: no model looks that up yet.
    """
    try:
        config = cls.config_class.from_dict(dict(content))
        if not getattr(config, "is_heterogeneous", False):
            return False  # before 5.14: read as any unknown entry, and without effect
        if any("skip" in overrides for overrides in content[PER_LAYER].values()):
            return False
        with torch.device("meta"):
            cls(config)
    except Exception:  # configurations raise any exception
        return False
    return True


def read_layers(folder: Path, cls: Any) -> tuple[Any, Any]:
    """The configuration without `per_layer_config`, and a class that builds what that says.

    Args:
        cls: The class of a manifest, which says in more detail how layers differ; or None.
    Returns:
        None and `cls` if the folder has no such entry, or Transformers applies it.
    Raises:
        InputError: it changes something other than numbers of heads and widths of MLPs.
    """
    path = folder / "config.json"
    content = read_object(path, "load", "Save the model again.") if path.is_file() else {}
    layers = content.pop(PER_LAYER, None)
    name = next(iter(content.get("architectures") or ()), None)
    if not layers or not isinstance(name, str):
        return None, cls
    base = cls or transformers_class(name, folder)
    if applies(base, content | {PER_LAYER: layers}):
        return None, cls
    config = base.config_class.from_dict(content)
    if cls is None:
        changes = _changes_of(layers, base, content, path)
        cls = changed_class({"architecture": name, **changes}, folder)
    return config, cls


def _changes_of(layers: Any, cls: Any, content: Mapping[str, Any], path: Path) -> Changes:
    """What `per_layer_config` changes in the model that the rest of a configuration builds."""
    config = cls.config_class.from_dict(dict(content))
    with torch.device("meta"):
        built = cls(config)
    changes: Changes = {"tensors": {}, "counts": {}, "heads": {}}
    for number, overrides in _checked(layers, config, path).items():
        variant = cls.config_class.from_dict(dict(content))
        # Set afterwards: the checks of a configuration refuse heads that do not divide its width.
        for name, count in overrides.items():
            setattr(variant, name, count)
        with torch.device("meta"):
            differing = differences_between(cls(variant), built)
        prefixes = tuple(f"{name}." for name, nth, _ in _layers(built) if nth == number)
        for part, entries in differing.items():
            inside = {name: x for name, x in entries.items() if name.startswith(prefixes)}
            changes[part] |= inside
    changes["tensors"] = {name: [*shape] for name, shape in changes["tensors"].items()}
    return changes


def _checked(layers: Any, config: Any, path: Path) -> dict[int, dict[str, int]]:
    checked = {}
    for key, overrides in layers.items() if isinstance(layers, dict) else [("", layers)]:
        number = int(key) if str(key).isdecimal() else -1
        if not 0 <= number < config.num_hidden_layers or not isinstance(overrides, dict):
            raise InputError(
                f"load: {path} has the entry {key!r} in {PER_LAYER}, which is no layer of its "
                f"{config.num_hidden_layers}. Save the model again."
            )
        for name, count in overrides.items():
            if name not in _KNOWN or type(count) is not int or count < 1:
                raise InputError(
                    f"load: {path} sets {name} of layer {number} to {count!r}, and only numbers "
                    f"for {', '.join(_KNOWN)} are applied. Open it with a Transformers that "
                    f"builds such a model."
                )
        checked[number] = overrides
    return checked


def _layers(model: nn.Module) -> Iterator[tuple[str, int, nn.Module]]:
    """The name, number and module of each layer, in the one list of so many modules."""
    n_layers = getattr(model.config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            for number, layer in enumerate(module):
                yield f"{name}.{number}", number, layer
            return
