"""Heads that are bound to their place: by position biases that the model makes for all of them."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise.models import Attention, OwnHeads, call_with, in_evaluation


def carry_biases(
    model: nn.Module, small: nn.Module, kept: Mapping[Attention, Sequence[int]], batch: Any
) -> None:
    """Let each attention of the smaller model go on with the biases of the heads that it keeps.

    Args:
        kept: Of each attention of the model that heads were cut out of, those that stay.
    """
    for attention in _given_biases(model, kept, batch):
        heads, n_heads = [*kept[attention]], attention.site.n_heads
        module = small.get_submodule(attention.site.name)
        before = OwnHeads.on(module)
        if before is not None:  # heads were cut out before
            heads, n_heads = [before.heads[head] for head in heads], before.n_heads
        OwnHeads(heads, n_heads).put_on(module)


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

    with ExitStack() as hooks, in_evaluation(model):
        for attention in attentions:
            if hasattr(attention.module, "has_relative_attention_bias"):
                continue  # the first layer makes them for all, and of as many heads as it keeps
            put = attention.module.register_forward_pre_hook
            told = partial(look, attention)
            hooks.callback(put(told, with_kwargs=True).remove)
        call_with(model, batch)
    return found
