"""How a model differs from the one that its configuration builds: fewer heads here and there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError

# What modules call the counts and widths that heads decide.
COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head",
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_groups", "n_rep",
    "split_size", "all_head_size", "inner_dim", "embed_dim",
)  # fmt: skip
_OF_CONFIG = "config."


class LayerConfig:
    """A configuration with a few values of one layer's own; in all else it follows the model's.

    A copy would not follow when the model is told to attend by other means.
    """

    def __init__(self, whole: Any, own: dict[str, int]) -> None:
        self.__dict__.update(_whole=whole, _own=own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_own" not in self.__dict__:
            raise AttributeError(name)
        own: dict[str, int] = self.__dict__["_own"]
        return own[name] if name in own else getattr(self.__dict__["_whole"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._whole, name, value)


def set_count(module: nn.Module, name: str, count: int) -> None:
    """Set a count of one module; `config.` before its name means that of its configuration."""
    if not name.startswith(_OF_CONFIG):
        setattr(module, name, count)
        return
    if not isinstance(module.config, LayerConfig):
        module.config = LayerConfig(module.config, {})  # type: ignore[assignment]
    own: dict[str, int] = module.config.__dict__["_own"]
    own[name.removeprefix(_OF_CONFIG)] = count


@dataclass(frozen=True)
class Differences:
    """What to change in a model that its configuration has built.

    Attributes:
        tensors: The shape of each weight that is another or that is further.
        counts: The counts of each module that differ, by the module's name.
    """

    tensors: Mapping[str, tuple[int, ...]]
    counts: Mapping[str, Mapping[str, int]]

    @classmethod
    def between(cls, model: nn.Module, built: nn.Module) -> "Differences":
        """How `model` differs from what was built from its configuration."""
        known = {name: tuple(x.shape) for name, x in built.named_parameters()}
        shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
        tensors = {name: shape for name, shape in shapes.items() if known.get(name) != shape}
        before, counts = dict(built.named_modules()), {}
        for name, module in model.named_modules():
            own = _counts_of(module)
            was = _counts_of(before[name]) if name in before else {}
            changed = {key: count for key, count in own.items() if was.get(key) != count}
            if changed:
                counts[name] = changed
        return cls(tensors, counts)

    @classmethod
    def read(cls, content: Mapping[str, Any], where: str) -> "Differences":
        """What `asdict` gave, checked: only shapes of weights and counts that heads decide.

        Raises:
            InputError: there is something else.
        """
        tensors, counts = content.get("tensors"), content.get("counts")
        if not isinstance(tensors, dict) or not isinstance(counts, dict):
            raise InputError(f"load: {where} lacks tensors or counts. Save the model again.")
        for name, shape in tensors.items():
            if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
                raise InputError(f"load: {where} gives {name} the shape {shape!r}. Save it again.")
        for name, own in counts.items():
            for key, count in own.items() if isinstance(own, dict) else [(None, own)]:
                known = isinstance(key, str) and key.removeprefix(_OF_CONFIG) in COUNTS
                if not known or type(count) is not int or count < 1:
                    raise InputError(
                        f"load: {where} sets {key!r} of {name} to {count!r}, which is no count of "
                        f"heads. Save the model again."
                    )
        return cls({name: tuple(shape) for name, shape in tensors.items()}, counts)

    def apply(self, model: nn.Module) -> None:
        """Make a model that its configuration has built into the one that was saved.

        Weights are made anew, empty: they are to be loaded.

        Raises:
            InputError: the model has no such module or weight.
        """
        for name, shape in self.tensors.items():
            place, _, weight = name.rpartition(".")
            module = _module(model, place)
            like = getattr(module, weight, None)
            like = getattr(module, "weight", None) if like is None and weight == "bias" else like
            if not isinstance(like, nn.Parameter):
                raise InputError(
                    f"load: {type(model).__name__} has no weight {name}. Save the model again."
                )
            empty = torch.empty(shape, dtype=like.dtype, device=like.device)
            setattr(module, weight, nn.Parameter(empty, requires_grad=like.requires_grad))
            resize(module)
        for name, counts in self.counts.items():
            for key, count in counts.items():
                set_count(_module(model, name), key, count)


def resize(module: nn.Module) -> None:
    """Let a linear layer tell the sizes of its weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif hasattr(module, "nf"):
        module.nx, module.nf = module.get_parameter("weight").shape  # type: ignore[assignment]


def _counts_of(module: nn.Module) -> dict[str, int]:
    own = {key: x for key, x in module.__dict__.items() if key in COUNTS and type(x) is int}
    config = module.__dict__.get("config")
    if isinstance(config, LayerConfig):
        own |= {_OF_CONFIG + key: count for key, count in config.__dict__["_own"].items()}
    return own


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise InputError(
            f"load: {type(model).__name__} has no module {name}. Save the model again."
        ) from error
