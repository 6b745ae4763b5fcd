"""A pruned model as one that stock Transformers builds from its configuration alone."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models.checkpoints._original_heads import ORIGINAL
from headwise.models.ownership import (
    HeadCounts,
    count_heads,
    find_attentions,
    find_ownership,
)

# Equal models whose configurations accept numbers of heads that the first ones refuse.
_EQUIVALENT = {"Llama": ("Mistral", {"sliding_window": None})}


def as_stock(model: nn.Module, batch: Any) -> nn.Module:
    """The same weights under a configuration with the number of heads that is left.

    Args:
        batch: An input to run it on.
    Returns:
        A model to be written, not to be run.
    Raises:
        UnsupportedError: layers have kept different numbers of heads, or no configuration of its
            class builds this model.
    """
    counts, head_dim = _uniform_counts(model, batch)
    errors = []
    for cls, sizes in _candidates(model, counts, head_dim):
        try:
            return rebuild(cls, _configuration(model, cls, sizes), model.state_dict())
        except Exception as error:  # configurations raise any exception
            errors.append(_last_line(error))
    advice = "Choose"
    if "would be None" in errors[-1]:  # a weight without a place, such as a bias
        advice = "Prune without fold (at the command line without --text), or choose"
    raise UnsupportedError(
        f"save: no configuration builds a {type(model).__name__} of {counts.heads} heads and "
        f"{counts.kv_heads} kv heads in each layer like this one ({errors[-1]}). "
        f"{advice} the format 'padded', 'remote-code' or 'headwise'."
    )


def rebuild(cls: Any, config: Any, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build a model from a configuration and give it these weights; to be written, not to be run.

    Biases that are missing among the weights are zeros.

    Raises:
        ValueError: a weight has no place in it, or another shape.
    """
    with torch.device("meta"):  # the weights are assigned below
        built: nn.Module = cls(config)
    expected = built.state_dict()
    new_biases = {name for name in expected.keys() - weights.keys() if name.endswith("bias")}
    for name in sorted((weights.keys() | expected.keys()) - new_biases):
        shape, needed = (tuple(x[name].shape) if name in x else None for x in (weights, expected))
        if shape != needed:
            raise ValueError(f"{name} is {shape} and would be {needed}")
    like = next(iter(weights.values()))
    zeros = {name: like.new_zeros(expected[name].shape) for name in new_biases}
    built.load_state_dict({**weights, **zeros}, assign=True)
    return built


def _uniform_counts(model: nn.Module, batch: Any) -> tuple[HeadCounts, int]:
    """The number of heads that every layer has, and their dimension."""
    attentions = find_attentions(model, batch)
    maps = find_ownership(model, attentions, batch)
    counts = {a.site.name: count_heads(a, maps[a]) for a in attentions}
    if len({*counts.values()}) > 1:
        listed = ", ".join(f"{count.heads} in {name}" for name, count in counts.items())
        raise UnsupportedError(
            f"save: stock Transformers needs the same number of heads in each layer, but there "
            f"are {listed}. "
            f"Choose the format 'padded', 'remote-code' or 'headwise', or plan with uniform=True "
            f"if a {type(model.config).__name__} can set the width of a head."
        )
    first = attentions[0]
    return counts[first.site.name], first.output.per_head.shape[1]


def _candidates(
    model: nn.Module, counts: HeadCounts, head_dim: int
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Model classes, each with changes of its configuration; the closest ones first."""
    import transformers

    config: Any = model.config
    sizes: dict[str, Any] = {"num_attention_heads": counts.heads}
    if hasattr(config, "num_key_value_heads"):
        sizes["num_key_value_heads"] = counts.kv_heads
    biased = [{"attention_bias": True}] if hasattr(config, "attention_bias") else []
    for bias in [{}, *biased]:
        for explicit in ({}, {"head_dim": head_dim}):
            yield type(model), sizes | explicit | bias
    name = type(model).__name__
    for family, (equivalent, more) in _EQUIVALENT.items():
        if name.startswith(family):
            cls = getattr(transformers, name.replace(family, equivalent, 1), None)
            if cls is not None:
                yield cls, sizes | {"head_dim": head_dim} | more


def _configuration(model: nn.Module, cls: Any, sizes: Mapping[str, Any]) -> Any:
    """The configuration of a model with other sizes, converted to that of `cls`."""
    config: Any = model.config
    content = config.to_dict()
    if cls.config_class is not type(config):
        known = cls.config_class().to_dict().keys() - {"model_type", "architectures"}
        content = {name: x for name, x in content.items() if name in {*known, ORIGINAL}}
    names = cls.config_class.attribute_map
    return cls.config_class.from_dict(
        content | {names.get(name, name): value for name, value in sizes.items()}
    )


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip(" .")
