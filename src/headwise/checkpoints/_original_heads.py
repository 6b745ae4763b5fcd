"""Which heads of the original model the heads of a pruned or grouped model are."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from headwise.errors import InputError
from headwise.tables import Head

# The key in our configurations and in those of Hugging Face, which save unknown keys too.
ORIGINAL = "original_heads"

Layers = Mapping[tuple[str, int], Sequence[int | None]]


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
