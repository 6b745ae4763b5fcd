"""A smaller model as one that stock Transformers builds from its configuration alone."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models.checkpoints._original import ORIGINAL
from headwise.models.ownership import (
    HeadCounts,
    count_heads,
    example_input,
    find_attentions,
    find_ownership,
)

# These compute the same, and their configurations take numbers of heads that the first refuse.
_KIN = {"Llama": ("Mistral", {"sliding_window": None})}


def as_stock(model: nn.Module) -> nn.Module:
    """The same weights under a configuration that says how many heads there are.

    Returns:
        A model to be written, not to be run.
    Raises:
        UnsupportedError: layers keep different numbers of heads, or no configuration of its class
            builds this model.
    """
    counts, width = _counts_of_all(model)
    why = []
    for cls, sizes in _candidates(model, counts, width):
        try:
            return rebuild(cls, _configuration(model, cls, sizes), model.state_dict())
        except Exception as error:  # configurations refuse with anything
            why.append(_line(error))
    raise UnsupportedError(
        f"save: no configuration builds a {type(model).__name__} of {counts.heads} heads and "
        f"{counts.kv_heads} kv heads in each layer like this one ({why[-1]}). Choose the format "
        f"'padded', 'remote-code' or 'headwise'."
    )


def rebuild(cls: Any, config: Any, weights: Mapping[str, Tensor]) -> nn.Module:
    """A model of a configuration that holds these weights, to be written, not to be run.

    Biases that it has beside them are zeros.

    Raises:
        ValueError: a weight has no place there, or another shape.
    """
    with torch.device("meta"):  # it is filled with weights that are there
        built: nn.Module = cls(config)
    wanted = built.state_dict()
    further = {x for x in wanted.keys() - weights.keys() if x.endswith("bias")}
    for name in sorted((weights.keys() | wanted.keys()) - further):
        has, needs = (tuple(x[name].shape) if name in x else None for x in (weights, wanted))
        if has != needs:
            raise ValueError(f"{name} is {has} and would be {needs}")
    like = next(iter(weights.values()))
    zeros = {name: like.new_zeros(wanted[name].shape) for name in further}
    built.load_state_dict({**weights, **zeros}, assign=True)
    return built


def _counts_of_all(model: nn.Module) -> tuple[HeadCounts, int]:
    """How many heads each layer has, and how wide they are."""
    batch = example_input(model)
    attentions = find_attentions(model, batch)
    shares = find_ownership(model, attentions, batch)
    counts = {a.site.name: count_heads(a, shares[a]) for a in attentions}
    if len({*counts.values()}) > 1:
        told = ", ".join(f"{one.heads} in {name}" for name, one in counts.items())
        raise UnsupportedError(
            f"save: stock Transformers wants as many heads in each layer, and there are {told}. "
            f"Choose the format 'padded', 'remote-code' or 'headwise', or plan with uniform=True "
            f"if a {type(model.config).__name__} can tell the width of a head."
        )
    first = attentions[0]
    return counts[first.site.name], first.output.per_head.shape[1]


def _candidates(
    model: nn.Module, counts: HeadCounts, width: int
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Classes, and what to change in their configurations; the nearest first."""
    import transformers

    config: Any = model.config
    sizes: dict[str, Any] = {"num_attention_heads": counts.heads}
    if hasattr(config, "num_key_value_heads"):
        sizes["num_key_value_heads"] = counts.kv_heads
    biased = [{"attention_bias": True}] if hasattr(config, "attention_bias") else []
    for bias in [{}, *biased]:
        for wide in ({}, {"head_dim": width}):
            yield type(model), sizes | wide | bias
    name = type(model).__name__
    for family, (kin, more) in _KIN.items():
        if name.startswith(family):
            cls = getattr(transformers, name.replace(family, kin, 1), None)
            if cls is not None:
                yield cls, sizes | {"head_dim": width} | more


def _configuration(model: nn.Module, cls: Any, sizes: Mapping[str, Any]) -> Any:
    """The configuration of a model with other sizes, as one of another class if need be."""
    own: Any = model.config
    content = own.to_dict()
    if cls.config_class is not type(own):
        known = cls.config_class().to_dict().keys() - {"model_type", "architectures"}
        content = {name: x for name, x in content.items() if name in {*known, ORIGINAL}}
    names = cls.config_class.attribute_map
    return cls.config_class.from_dict(
        content | {names.get(name, name): value for name, value in sizes.items()}
    )


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip(" .")
