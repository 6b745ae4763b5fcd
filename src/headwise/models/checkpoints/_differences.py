"""How a model differs from the one that its configuration builds: fewer heads here and there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.errors import InputError
from headwise.models.checkpoints._resize import OF_CONFIG, LayerConfig, OwnHeads, shrink

# What modules call the counts and widths that heads decide.
COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head",
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_groups", "n_rep",
    "split_size", "all_head_size", "inner_dim", "embed_dim",
)  # fmt: skip


@dataclass(frozen=True)
class Differences:
    """What to change in a model that its configuration has built.

    Attributes:
        tensors: The shape of each weight that is another or that is further.
        counts: The counts of each module that differ, by the module's name.
        heads: Of each module that is given position biases of all heads it once had: how many
            these are, and then which are its own.
    """

    tensors: Mapping[str, tuple[int, ...]]
    counts: Mapping[str, Mapping[str, int]]
    heads: Mapping[str, Sequence[int]]

    @classmethod
    def between(cls, model: nn.Module, built: nn.Module) -> "Differences":
        """How `model` differs from what was built from its configuration."""
        known = {name: tuple(x.shape) for name, x in built.named_parameters()}
        shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
        tensors = {name: shape for name, shape in shapes.items() if known.get(name) != shape}
        before, counts, heads = dict(built.named_modules()), {}, {}
        for name, module in model.named_modules():
            own = _counts_of(module)
            was = _counts_of(before[name]) if name in before else {}
            changed = {key: count for key, count in own.items() if was.get(key) != count}
            if changed:
                counts[name] = changed
            if (own_heads := OwnHeads.on(module)) is not None:
                heads[name] = (own_heads.n_heads, *own_heads.heads)
        return cls(tensors, counts, heads)

    @classmethod
    def read(cls, content: Mapping[str, Any], where: str) -> "Differences":
        """What `asdict` gave, checked: shapes of weights, counts that heads decide, and heads.

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
                known = isinstance(key, str) and key.removeprefix(OF_CONFIG) in COUNTS
                if not known or type(count) is not int or count < 1:
                    raise InputError(
                        f"load: {where} sets {key!r} of {name} to {count!r}, which is no count of "
                        f"heads. Save the model again."
                    )
        shapes = {name: tuple(shape) for name, shape in tensors.items()}
        return cls(shapes, counts, _read_heads(content.get("heads", {}), where))

    def apply(self, model: nn.Module) -> None:
        """Make a model that its configuration has built into the one that was saved.

        Weights are made anew, empty: they are to be loaded.

        Raises:
            InputError: the model has no such module or weight.
        """
        for name in self.tensors:
            place, _, weight = name.rpartition(".")
            module = _module(model, place)
            like = getattr(module, weight, None)
            like = getattr(module, "weight", None) if like is None and weight == "bias" else like
            if not isinstance(like, nn.Parameter):
                raise InputError(
                    f"load: {type(model).__name__} has no weight {name}. Save the model again."
                )
        for name in (*self.counts, *self.heads):
            _module(model, name)
        shrink(model, self.tensors, self.counts, self.heads)


def _counts_of(module: nn.Module) -> dict[str, int]:
    own = {key: x for key, x in module.__dict__.items() if key in COUNTS and type(x) is int}
    config = module.__dict__.get("config")
    if isinstance(config, LayerConfig):
        own |= {OF_CONFIG + key: count for key, count in config.__dict__["_own"].items()}
    return own


def _read_heads(content: Any, where: str) -> dict[str, list[int]]:
    for name, told in content.items() if isinstance(content, dict) else [(None, content)]:
        numbers = told if isinstance(told, list) and all(type(n) is int for n in told) else []
        n_heads, own = (numbers or [0])[0], numbers[1:]
        if not own or len({*own}) < len(own) or not all(0 <= head < n_heads for head in own):
            raise InputError(
                f"load: {where} gives {name} the heads {told!r}, which is not their number and "
                f"then some of them. Save the model again."
            )
    return dict(content)


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise InputError(
            f"load: {type(model).__name__} has no module {name}. Save the model again."
        ) from error
