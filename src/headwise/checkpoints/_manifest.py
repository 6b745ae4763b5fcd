"""The manifest `headwise.json`: how a model differs from what its configuration builds."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise._extras import require
from headwise.checkpoints._resize import CONFIG_PREFIX, BiasHeads, LayerConfig, shrink
from headwise.checkpoints._torch_layer import TorchCompatibleAttention, replace_torch_layers
from headwise.errors import InputError, UnsupportedError
from headwise.files import read_object
from headwise.models import HEADS, KV_HEADS, QUERIES_PER_KV_HEAD, WIDTHS, leave_uninitialized
from headwise.tables import Head

MANIFEST = "headwise.json"
# How a model differs from what its configuration builds.
#   tensors  the shape of each weight that is new or has another shape
#   counts   the counts of each module that differ, by the module's name
#   heads    per module that receives position biases or masks of all heads, or that replaces a
#            layer of torch: their number, then the heads that it keeps
Changes = dict[str, dict[str, Any]]
# The format of the manifest of a model of transformers.
CHANGED = "headwise-smaller/1"
# They change by the share of the rows or columns that weights lose.
_SHARES = {*HEADS, *KV_HEADS, *WIDTHS}
_COUNTS = {*_SHARES, *QUERIES_PER_KV_HEAD}
# The key in our configurations and in those of Hugging Face, which save unknown keys too.
ORIGINAL = "original_heads"

Layers = Mapping[tuple[str, int], Sequence[int | None]]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The content of `headwise.json` in a folder; None if there is no such file."""
    path = folder / MANIFEST
    return read_object(path, "load", "Save the model again.") if path.is_file() else None


def describe_changes(model: nn.Module) -> dict[str, Any] | None:
    """The manifest of a Hugging Face model; None if its configuration suffices."""
    transformers = require("transformers", "hf", "save")
    name = type(model).__name__
    cls = getattr(transformers, name, None)
    if not isinstance(model, transformers.PreTrainedModel) or cls is None:
        raise UnsupportedError(
            f"save: {name} is not a class of transformers, and only those can be loaded again. "
            f"Keep its state_dict, and cut the model again before loading it."
        )
    changes = differences_of(model)
    return None if changes is None else {"format": CHANGED, "architecture": name, **changes}


def differences_of(model: nn.Module) -> Changes | None:
    """How a model differs from what its configuration builds; None if it does not."""
    changes = differences_between(model, sketch(type(model), model.config))
    return changes if any(changes.values()) else None


def sketch(cls: Any, config: Any) -> nn.Module:
    """The model of a configuration, without memory for its weights."""
    with torch.device("meta"):
        built: nn.Module = cls(config)
    return built


def differences_between(model: nn.Module, built: nn.Module) -> Changes:
    """How `model` differs from `built`, which its configuration has built."""
    built_shapes = {name: [*x.shape] for name, x in built.named_parameters()}
    shapes = {name: [*x.shape] for name, x in model.named_parameters()}
    tensors = {name: shape for name, shape in shapes.items() if built_shapes.get(name) != shape}
    built_modules, counts, heads = dict(built.named_modules()), {}, {}
    for name, module in model.named_modules():
        before = _counts_of(built_modules[name]) if name in built_modules else {}
        after = _counts_of(module)
        changed = {key: count for key, count in after.items() if before.get(key) != count}
        if changed:
            counts[name] = changed
        if (bias_heads := BiasHeads.on(module)) is not None:
            heads[name] = [bias_heads.n_heads, *bias_heads.heads]
        if isinstance(module, TorchCompatibleAttention):
            heads[name] = [module.all_heads, *module.heads]
    return {"tensors": tensors, "counts": counts, "heads": heads}


def apply_changes(model: nn.Module, content: Any) -> None:
    """Apply what `differences_of` gave to a model that its configuration has built.

    Raises:
        InputError: it cannot be read.
    """
    content = content if isinstance(content, dict) else {}
    apply_checked(model, check_changes(content, MANIFEST))
    set_original_heads(model, read_original(content.get(ORIGINAL), MANIFEST))


def changed_class(manifest: Mapping[str, Any], folder: Path) -> Any:
    """A class that builds a model of its base by its configuration, and changes it at once.

    `from_pretrained` then reads weights of the changed shapes; after it, they would not fit.
    """
    base = transformers_class(manifest.get("architecture"), folder)
    changes = check_changes(manifest, str(folder / MANIFEST))

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        apply_checked(self, changes)
        self.__class__ = base  # only building needs the changed class

    # Transformers decides how to read weights by the name and the module of the class.
    return type(base.__name__, (base,), {"__init__": build, "__module__": base.__module__})


def transformers_class(name: Any, folder: Path) -> Any:
    """The model class that a folder names, if it is one of transformers."""
    transformers = require("transformers", "hf", "load")
    cls: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise InputError(
            f"load: {folder} names the class {name!r}, which transformers does not have, and "
            f"no other code is run. Give a folder that headwise saved."
        )
    return cls


def check_changes(content: Mapping[str, Any], path: str) -> Changes:
    """The changes in a file, after a check of their form."""
    tensors, counts, heads = (content.get(name) for name in ("tensors", "counts", "heads"))
    if not isinstance(tensors, dict) or not isinstance(counts, dict):
        raise InputError(f"load: {path} lacks tensors or counts. Save the model again.")
    for name, shape in tensors.items():
        if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
            raise InputError(f"load: {path} gives {name} the shape {shape!r}. Save it again.")
    for name, entries in counts.items():
        for key, count in entries.items() if isinstance(entries, dict) else [(None, entries)]:
            known = isinstance(key, str) and key.removeprefix(CONFIG_PREFIX) in _COUNTS
            if not known or type(count) is not int or count < 1:
                raise InputError(
                    f"load: {path} sets {key!r} of {name} to {count!r}, which is not a number "
                    f"of heads. Save the model again."
                )
    heads = {} if heads is None else heads
    for name, value in heads.items() if isinstance(heads, dict) else [(None, heads)]:
        numbers = value if isinstance(value, list) and all(type(n) is int for n in value) else []
        n_heads, kept = (numbers or [0])[0], numbers[1:]
        if not kept or len({*kept}) < len(kept) or not all(0 <= head < n_heads for head in kept):
            raise InputError(
                f"load: {path} gives {name} the heads {value!r}, which is not their number "
                f"followed by some of them. Save the model again."
            )
    return {"tensors": tensors, "counts": counts, "heads": heads}


def apply_checked(model: nn.Module, changes: Changes) -> None:
    """Change a model that its configuration has built into the one that was saved.

    The changed weights are uninitialized; load them afterwards.
    """
    tensors, counts, heads = changes["tensors"], changes["counts"], dict(changes["heads"])
    torch_layers = [
        name for name in heads if isinstance(_module(model, name), nn.MultiheadAttention)
    ]
    replace_torch_layers(model, torch_layers)
    for name in torch_layers:
        _module(model, name).heads = [*heads.pop(name)[1:]]  # type: ignore[assignment]
        leave_uninitialized(_module(model, name.rpartition(".")[0]))
    for name in tensors:
        parent, _, weight = name.rpartition(".")
        module = _module(model, parent)
        like = getattr(module, weight, None)
        like = getattr(module, "weight", None) if like is None and weight == "bias" else like
        if not isinstance(like, nn.Parameter):
            raise InputError(
                f"load: {MANIFEST} changes the weight {name:.80}, and {type(model).__name__} has "
                f"none of this name. Save the model again."
            )
    for name in (*counts, *heads):
        _module(model, name)
    _check_counts(model, tensors, counts)
    shrink(model, tensors, counts, heads)


def _check_counts(
    model: nn.Module, tensors: Mapping[str, Any], counts: Mapping[str, Mapping[str, int]]
) -> None:
    """Refuse numbers of heads where no weight around the module has lost the same share of its
    rows or columns: such a model would be built, and give other outputs than the saved one."""
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
    for name, of_module in counts.items():
        module, around = _module(model, name), name.rpartition(".")[0]
        sizes = [
            pair
            for weight, shape in tensors.items()
            if weight.startswith(around and f"{around}.") and weight in shapes
            for pair in zip(shapes[weight], shape, strict=False)
        ]
        for key, count in of_module.items():
            field = key.removeprefix(CONFIG_PREFIX)
            place = module.config if key.startswith(CONFIG_PREFIX) else module
            before = getattr(place, field, None)
            if field not in _SHARES or type(before) is not int or before == count:
                continue
            # A weight of queries, keys and values together changes by another share.
            fits = (
                any(new != old for old, new in sizes)
                if field in KV_HEADS
                else any(new * before == old * count for old, new in sizes)
            )
            if not fits:
                raise InputError(
                    f"load: {MANIFEST} sets {key} of {name:.80} to {count} from {before}, and no "
                    f"weight around it changes by this share. Save the model again."
                )


def _counts_of(module: nn.Module) -> dict[str, int]:
    counts = {key: x for key, x in module.__dict__.items() if key in _COUNTS and type(x) is int}
    config = module.__dict__.get("config")
    if isinstance(config, LayerConfig):
        overrides = config.__dict__["_overrides"]
        counts |= {CONFIG_PREFIX + key: count for key, count in overrides.items()}
    return counts


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise InputError(
            f"load: headwise.json changes the module {name:.80}, and {type(model).__name__} has "
            f"none of this name. Save the model again."
        ) from error


# Which heads of the original model the heads of a pruned model are.


def original_heads(model: nn.Module) -> dict[str, list[int | None]]:
    """Per layer, the original number of each head; empty if it is not known.

    A layer is named as in `L5.H3`, without the head. None stands for a head of zeros that pads a
    layer to its original size.
    """
    return getattr(_holder(model), ORIGINAL, None) or {}


def set_original_heads(model: nn.Module, original: Mapping[str, Sequence[int | None]]) -> None:
    """Record the original number of each head, where it is saved with the model."""
    setattr(_holder(model), ORIGINAL, {name: [*heads] for name, heads in original.items()})


def compose_heads(model: nn.Module, layers: Layers) -> dict[str, list[int | None]]:
    """The original heads of a model whose heads are some of the heads of `model`.

    Args:
        layers: Per stack and layer, which heads of `model` those of the other model are.
    """
    known = original_heads(model)
    composed = {_layer(*layer): [*heads] for layer, heads in layers.items()}
    for name, heads in composed.items():
        if name in known:
            composed[name] = [_nth(known[name], head) for head in heads]
    return {**known, **composed}


def originals_of(model: nn.Module, heads: Iterable[Head]) -> tuple[Head | None, ...]:
    """The original address of each head; empty if none are recorded for this model."""
    known, originals = original_heads(model), list[Head | None]()
    for head in heads if known else ():
        number = _nth(known.get(_layer(head.stack, head.layer), ()), head.head)
        originals.append(None if number is None else Head(head.stack, head.layer, number))
    return tuple(originals)


def read_original(content: Any, path: str) -> dict[str, list[int | None]]:
    """Read the original heads in a file; empty if there are none."""
    if content is None:
        return {}
    for name, heads in content.items() if isinstance(content, dict) else [(None, content)]:
        numbers = [head for head in heads if head is not None] if isinstance(heads, list) else [-1]
        valid = all(type(head) is int and head >= 0 for head in numbers)
        if not valid or len(set(numbers)) < len(numbers):
            raise InputError(
                f"load: {path} gives {name} the original heads {heads!r}, which are not "
                f"different numbers from 0 on. Save the model again."
            )
    return dict(content)


def _nth(heads: Sequence[int | None], nth: int | None) -> int | None:
    return heads[nth] if nth is not None and nth < len(heads) else None


def _layer(stack: str, layer: int) -> str:
    return f"{stack}.L{layer}" if stack else f"L{layer}"


def _holder(model: nn.Module) -> Any:
    """The configuration of a Hugging Face model, which is saved with it; else the model itself."""
    config: Any = getattr(model, "config", None)
    return config if hasattr(config, "to_dict") else model
