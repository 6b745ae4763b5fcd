"""Heads that are bound to position biases which the model makes for all heads at once."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise._evaluation import in_evaluation
from headwise.models import Attention, call_model, hooked
from headwise.models.checkpoints import BiasHeads, returns_biases


def bound_to_biases(
    model: nn.Module, kept: Mapping[Attention, Sequence[int]], batch: Any
) -> list[Attention]:
    """The attentions that must select the biases of their heads from those of all heads.

    Args:
        kept: The heads that stay, for each attention of the model.
    """
    bound = _receive_biases(model, kept, batch)
    stacks: dict[str, list[Attention]] = {}
    for attention in kept:
        if returns_biases(attention.module):
            stacks.setdefault(attention.site.stack, []).append(attention)
    for layers in stacks.values():
        uniform = len({tuple(kept[layer]) for layer in layers}) == 1
        # If all layers keep the same heads, the biases of the first layer are cut like its weights.
        if not uniform or any(BiasHeads.on(layer.module) for layer in layers):
            bound |= dict.fromkeys(layers)
    return [attention for attention in bound if len(kept[attention]) < attention.site.n_heads]


def select_biases(
    bound: Iterable[Attention], small: nn.Module, kept: Mapping[Attention, Sequence[int]]
) -> None:
    """Let attentions of the smaller model select the biases of the heads that they keep."""
    for attention in bound:
        heads, n_heads = [*kept[attention]], attention.site.n_heads
        module = small.get_submodule(attention.site.name)
        before = BiasHeads.on(module)
        if before is not None:  # the model was pruned before
            heads, n_heads = [before.heads[head] for head in heads], before.n_heads
        BiasHeads(heads, n_heads).put_on(module)


@torch.no_grad()
def _receive_biases(
    model: nn.Module, attentions: Iterable[Attention], batch: Any
) -> dict[Attention, None]:
    """The attentions that receive position biases of all their heads as an argument."""
    receivers: dict[Attention, None] = {}

    def inspect_call(attention: Attention, module: nn.Module, args: Any, kwargs: Any) -> None:
        all_heads = BiasHeads(range(attention.site.n_heads), attention.site.n_heads)
        names = [*inspect.signature(type(module).forward).parameters][1:]
        for name, x in [*zip(names, args, strict=False), *kwargs.items()]:
            if all_heads.select(name, x) is not x:
                receivers[attention] = None

    # Layers that return biases are handled by stack: their first layer makes them for all layers.
    direct = [attention for attention in attentions if not returns_biases(attention.module)]
    hooks = [(attention.module, partial(inspect_call, attention)) for attention in direct]
    with hooked(before=hooks, with_kwargs=True), in_evaluation(model):
        call_model(model, batch)
    return receivers
