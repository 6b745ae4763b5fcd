"""Cut heads out of the weights of a model, and bind heads to the position biases of all heads."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.checkpoints import (
    CONFIG_PREFIX,
    BiasHeads,
    LayerConfig,
    is_bias_table,
    replace_torch_layers,
    returns_biases,
    set_count,
    update_heads,
    update_sizes,
)
from headwise.errors import UnsupportedError
from headwise.models import HEADS, KV_HEADS, QUERIES_PER_KV_HEAD, WIDTHS, copy_model, hooked
from headwise.ownership import (
    Attention,
    HeadCounts,
    KeptHeads,
    OwnershipMap,
    call_model,
    count_heads,
    find_attentions,
    find_ownership,
    keep_heads,
    kept_indices,
)


def cut_heads(
    model: nn.Module, kept: Mapping[Attention, tuple[int, ...]], batch: Any, *, expand: bool
) -> tuple[nn.Module, dict[Attention, Attention]]:
    """Cut heads out of a copy of a model.

    Args:
        kept: The heads that stay, for every attention of the model.
        batch: An input to run the copy on.
        expand: Whether kv heads may be copied for single query heads.
    Returns:
        The smaller model, and its attention for each attention of `model`.
    Raises:
        UnsupportedError: the weights cannot be cut, or the groups would differ in size.
    """
    changed = {
        attention: heads
        for attention, heads in kept.items()
        if attention.nth == 0 and len(heads) < attention.site.n_heads
    }
    torch_layers = [attention.site.name for attention in changed if not attention.called]
    small = replace_torch_layers(copy_model("prune", model), torch_layers)
    counterparts = dict(zip(kept, find_attentions(small, batch), strict=True))
    smaller = [counterparts[attention] for attention in changed]
    with _noting_reads(small, smaller) as reads:
        maps = find_ownership(small, smaller, batch)
    bound = bound_to_biases(model, kept, batch)
    smaller_heads = {
        attention: keep_heads(counterparts[attention], maps[counterparts[attention]], heads, expand)
        for attention, heads in changed.items()
    }
    _check_lenders(kept, smaller_heads)
    for attention, kept_heads in smaller_heads.items():
        owned = maps[counterparts[attention]]
        if attention in bound:  # it selects its heads of biases that stay as they are
            owned = [owners for owners in owned if not is_bias_table(owners.name)]
        _cut(small, counterparts[attention], owned, kept_heads, reads)
    select_biases(bound, small, kept)
    update_heads(small, {counterparts[a].module: heads for a, heads in changed.items()})
    return small, counterparts


def _check_lenders(attentions: Iterable[Attention], smaller: Mapping[Attention, KeptHeads]) -> None:
    """Refuse to cut a layer and the layer whose keys it reads so that they differ in kv heads."""
    by_site = {attention.site: attention for attention in attentions}
    for attention in by_site.values():
        if attention.lender is None:
            continue
        both = attention, by_site[attention.lender]
        own, lent = (
            [*smaller[a].kv_heads] if a in smaller else [*range(a.site.n_kv_heads)] for a in both
        )
        if own != lent:
            raise UnsupportedError(
                f"prune: {attention.site} attends to the keys and values of "
                f"{attention.lender.name}, and would read its kv heads {own} where {lent} stay. "
                f"Remove the same groups of heads from both."
            )


def fold_into_bias(model: nn.Module, attention: Attention, add: Float[Tensor, " d_model"]) -> None:
    """Add a constant to the bias of the output projection, which gets one if it has none."""
    module = model.get_submodule(attention.output.name)
    bias = attention.output.bias
    with torch.no_grad():
        new = add if bias is None else bias + add.to(bias)
    weight = attention.output.weight
    module.bias = nn.Parameter(new.to(weight).detach(), requires_grad=weight.requires_grad)


@torch.no_grad()
def _cut(
    model: nn.Module,
    attention: Attention,
    maps: Sequence[OwnershipMap],
    kept: KeptHeads,
    reads: Mapping[nn.Module, set[str]],
) -> None:
    """Remove, in place, every index of the weights that belongs to a removed head.

    Args:
        reads: Which values of the configuration each module reads in its forward pass.
    """
    old = count_heads(attention, maps)
    head_dim = attention.output.per_head.shape[1]
    for owners in maps:
        parent, _, name = owners.name.rpartition(".")
        module = model.get_submodule(parent)
        weight = getattr(module, name)
        indices = kept_indices(owners, old, kept).to(weight.device)
        _replace(module, name, weight.index_select(owners.axis, indices))
    for module in model.get_submodule(attention.around).modules():
        _update_counts(module, old, kept.counts, head_dim, reads.get(module, set()))


def _replace(module: nn.Module, name: str, weight: Tensor) -> None:
    old = getattr(module, name)
    if isinstance(old, nn.Parameter):
        setattr(module, name, nn.Parameter(weight.clone(), requires_grad=old.requires_grad))
    else:
        setattr(module, name, weight.clone())
    update_sizes(module)


def _update_counts(
    module: nn.Module, old: HeadCounts, new: HeadCounts, head_dim: int, reads: set[str]
) -> None:
    """Set the counts of a module that have one of the usual names and the old value, and those
    that it reads from its configuration."""
    groups = old.heads // old.kv_heads, new.heads // new.kv_heads
    changes = {
        HEADS: (old.heads, new.heads),
        KV_HEADS: (old.kv_heads, new.kv_heads),
        QUERIES_PER_KV_HEAD: groups,
        WIDTHS: (old.heads * head_dim, new.heads * head_dim),
    }
    for names, (before, after) in changes.items():
        for name in names:
            if module.__dict__.get(name) == before:
                set_count(module, name, after)
            if name in reads and getattr(module.config, name) == before:
                set_count(module, f"{CONFIG_PREFIX}{name}", after)


class _NotingConfig(LayerConfig):
    """A configuration that notes which of its values are read."""

    def __init__(self, model_config: Any) -> None:
        super().__init__(model_config, {})
        self.__dict__["read"] = set[str]()

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        self.__dict__["read"].add(name)
        return value


@contextmanager
def _noting_reads(
    model: nn.Module, attentions: Iterable[Attention]
) -> Iterator[dict[nn.Module, set[str]]]:
    """Note which values of its configuration each module of some attentions reads in its call.

    Such a module would read the counts of the whole model after heads of its layer are gone.
    """
    around = {m: None for a in attentions for m in model.get_submodule(a.around).modules()}
    configs = {m: m.__dict__["config"] for m in around if "config" in m.__dict__}
    noting = {module: _NotingConfig(config) for module, config in configs.items()}
    try:
        for module, config in noting.items():
            module.__dict__["config"] = config
        yield {module: config.__dict__["read"] for module, config in noting.items()}
    finally:
        for module, config in configs.items():
            module.__dict__["config"] = config


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
