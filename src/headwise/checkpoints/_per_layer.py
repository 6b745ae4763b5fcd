"""`per_layer_config`: the part of a configuration that says how single layers differ.

Transformers 5.14 and later reads it, and few of its models apply it yet: others raise when they
look up a number that layers may differ in. Such a model is built here from its folder.
"""

import json
import re
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from torch import nn

from headwise._extras import require
from headwise.checkpoints._manifest import (
    Changes,
    changed_class,
    differences_between,
    sketch,
    transformers_class,
)
from headwise.errors import InputError

_ENTRY = "per_layer_config"
# The switch of Transformers that lets a number be read that layers differ in. Without it a
# configuration with the entry cannot be opened where the model does not apply the entry.
_READABLE = "allow_global_per_layer_attribute_access"
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
_KNOWN = (_HEADS, _KV_HEADS, "intermediate_size")
# A weight whose shape tells a number of heads: that of queries may hold gates too.
_PROJECTION = re.compile(r"(?:model\.)?layers\.(\d+)\.self_attn\.([ok])_proj\.weight")
_LAYER = re.compile(r"(?:\w+\.)*?(?:layers?|h|blocks)\.(\d+)\.")  # the beginning of a name in it


def write_layers(model: nn.Module, changes: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Add `per_layer_config` to the configuration in a folder, which still opens with it.

    Args:
        changes: How the model differs from what its configuration builds.
    Returns:
        The entry. It is empty where none could describe the layers: the model has other layers than
        one stack of projections, its configuration ties the width of a head to their number, or has
        such an entry already, which stays as it is.
    """
    config: Any = model.config
    layers: dict[str, dict[str, int]] = {}
    # A configuration with such an entry refuses to tell a width that layers differ in.
    tensors = {} if getattr(config, "is_heterogeneous", False) else changes["tensors"]
    for name, shape in tensors.items():
        match = _PROJECTION.fullmatch(name)
        if match and (head_dim := getattr(config, "head_dim", None)):
            key, axis = (_HEADS, 1) if match[2] == "o" else (_KV_HEADS, 0)
            if hasattr(config, key):
                layers.setdefault(match[1], {})[key] = shape[axis] // head_dim
    if layers:
        path = folder / "config.json"
        content = json.loads(path.read_text("utf-8")) | {_ENTRY: layers, _READABLE: True}
        path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    return {_ENTRY: layers} if layers else {}


def read_layers(folder: Path, cls: Any) -> tuple[Any, Any]:
    """The configuration without `per_layer_config`, and a class that builds what that says.

    Args:
        cls: The class of a manifest, which says in more detail how layers differ; or None.
    Returns:
        None and `cls` if the folder has no such entry, or Transformers applies it.
    Raises:
        InputError: it changes something other than numbers of heads and widths of MLPs.
    """
    transformers = require("transformers", "hf", "load")
    path = folder / "config.json"
    # Not plain JSON: Transformers writes an infinity as an object.
    content, _ = transformers.PreTrainedConfig.get_config_dict(str(folder))
    layers = content.pop(_ENTRY, None)
    content.pop(_READABLE, None)
    name = next(iter(content.get("architectures") or ()), None)
    if not layers or not isinstance(name, str):
        return None, cls
    base = cls or transformers_class(name, folder)

    def build(config: Any) -> nn.Module:
        return sketch(base, config)

    if _applies(base, content | {_ENTRY: layers}, build):
        return None, cls
    config = base.config_class.from_dict(content)
    if cls is None:
        changes = _changes_of(_checked(layers, config, path), config, build)
        cls = changed_class({"architecture": name, **changes}, folder)
    return config, cls


def _applies(cls: Any, content: Mapping[str, Any], build: Callable[[Any], nn.Module]) -> bool:
    """Whether Transformers builds each layer as `per_layer_config` says: other models raise."""
    try:
        config = cls.config_class.from_dict({**content})
        build(config)
        # No model looks up `skip` yet. Before 5.14 a configuration does not know the entry.
        skips = any("skip" in overrides for overrides in content[_ENTRY].values())
        return bool(config.is_heterogeneous) and not skips
    except Exception:  # configurations raise any exception
        return False


def _changes_of(
    layers: Mapping[int, Any], config: Any, build: Callable[[Any], nn.Module]
) -> Changes:
    """What layers of other numbers change in the model that a configuration builds."""
    built = build(config)
    changes: Changes = {"tensors": {}, "counts": {}, "heads": {}}
    # A whole model is built for the numbers of a layer, and once for all layers with the same.
    for overrides in {json.dumps(x, sort_keys=True): x for x in layers.values()}.values():
        variant = copy(config)
        # Set afterwards: the checks of a configuration refuse heads that do not divide its width.
        for name, count in overrides.items():
            setattr(variant, name, count)
        for part, entries in differences_between(build(variant), built).items():
            for name, change in entries.items():
                match = _LAYER.match(name)
                if match and layers.get(int(match[1])) == overrides:
                    changes[part][name] = change
    return changes


def _checked(layers: Any, config: Any, path: Path) -> dict[int, dict[str, int]]:
    checked = {}
    for key, overrides in layers.items() if isinstance(layers, dict) else [("", layers)]:
        layer = int(key) if re.fullmatch("[0-9]{1,9}", key) else -1
        numbers = overrides if isinstance(overrides, dict) else {"": overrides}
        known = all(name in _KNOWN and type(x) is int and x > 0 for name, x in numbers.items())
        heads, kv_heads = (
            numbers.get(name) or getattr(config, name, None) or 1 for name in (_HEADS, _KV_HEADS)
        )
        if not (0 <= layer < config.num_hidden_layers and known and heads % kv_heads == 0):
            raise InputError(
                f"load: {path} has the entry {key[:80]!r}: {overrides!r:.80} in {_ENTRY}. It may "
                f"set {', '.join(_KNOWN)} of its {config.num_hidden_layers} layers, where kv "
                f"heads divide heads. Save the model again, or open it with a newer Transformers."
            )
        checked[layer] = numbers
    return checked
