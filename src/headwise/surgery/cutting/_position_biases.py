"""Heads that are bound to their place: by position biases that the model makes for all of them."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise.models import (
    TABLE,
    Attention,
    OwnershipMap,
    OwnHeads,
    call_model,
    hands_on,
    hooked,
    in_evaluation,
)


def bound_to_biases(
    model: nn.Module, kept: Mapping[Attention, Sequence[int]], batch: Any
) -> list[Attention]:
    """The attentions that must take the position biases of their heads out of those for all.

    Args:
        kept: Of each attention of the model, the heads that stay.
    """
    given = _given_biases(model, kept, batch)
    stacks: dict[str, list[Attention]] = {}
    for attention in kept:
        if hands_on(attention.module):
            stacks.setdefault(attention.site.stack, []).append(attention)
    for layers in stacks.values():
        alike = len({tuple(kept[one]) for one in layers}) == 1
        # Where all layers keep the same heads, what the first makes is cut as they are.
        if not alike or any(OwnHeads.on(one.module) for one in layers):
            given |= dict.fromkeys(layers)
    return [one for one in given if len(kept[one]) < one.site.n_heads]


def carry_biases(
    bound: Iterable[Attention], small: nn.Module, kept: Mapping[Attention, Sequence[int]]
) -> None:
    """Let attentions of the smaller model go on with the biases of the heads that they keep."""
    for attention in bound:
        heads, n_heads = [*kept[attention]], attention.site.n_heads
        module = small.get_submodule(attention.site.name)
        before = OwnHeads.on(module)
        if before is not None:  # heads were cut out before
            heads, n_heads = [before.heads[head] for head in heads], before.n_heads
        OwnHeads(heads, n_heads).put_on(module)


def is_bias_table(share: OwnershipMap) -> bool:
    """Whether a weight holds the position biases that a layer makes for its whole stack."""
    return TABLE in share.name.split(".")


@torch.no_grad()
def _given_biases(
    model: nn.Module, attentions: Iterable[Attention], batch: Any
) -> dict[Attention, None]:
    """The attentions that are given position biases of all their heads by whoever calls them."""
    found: dict[Attention, None] = {}

    def look(attention: Attention, module: nn.Module, args: Any, kwargs: Any) -> None:
        every = OwnHeads(range(attention.site.n_heads), attention.site.n_heads)
        names = [*inspect.signature(type(module).forward).parameters][1:]
        for name, x in [*zip(names, args, strict=False), *kwargs.items()]:
            if every.of(name, x) is not x:
                found[attention] = None

    # Of layers that hand them on, the first makes them for all, perhaps of the heads it keeps.
    own = [attention for attention in attentions if not hands_on(attention.module)]
    looks = [(attention.module, partial(look, attention)) for attention in own]
    with hooked(before=looks, with_kwargs=True), in_evaluation(model):
        call_model(model, batch)
    return found
