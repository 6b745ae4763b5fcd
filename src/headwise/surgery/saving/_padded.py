"""A smaller model at its old size again: zeros stand where its heads were."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models import (
    ORIGINAL,
    Attention,
    HeadCounts,
    OwnershipMap,
    OwnHeads,
    compose_heads,
    count_heads,
    example_input,
    find_attentions,
    find_ownership,
    original_heads,
    rebuild,
)
from headwise.surgery.cutting import Keep, is_bias_table, kept_indices


def as_padded(model: nn.Module) -> nn.Module:
    """The model that the configuration builds, which answers what the smaller one does.

    It is as large and as slow as the model was before heads were cut out of it.

    Returns:
        A model to be written, not to be run.
    Raises:
        UnsupportedError: there is no room, as for kv heads that single heads were given, or for
            a mean that was folded into a bias which the configuration does not give.
    """
    cls: Any = type(model)
    config: Any = model.config
    with torch.random.fork_rng():  # its weights are drawn, and matter to nobody
        full = cls(config).to(next(model.parameters()).device)
    batch = example_input(model)
    weights = {name: x.detach() for name, x in model.state_dict().items()}
    theirs = find_attentions(full, batch)
    shares = find_ownership(full, theirs, batch)
    heads: dict[nn.Module, Sequence[int]] = {}
    layers: dict[tuple[str, int], list[int | None]] = {}
    for own, other in zip(find_attentions(model, batch), theirs, strict=True):
        if own.nth == 0:
            spread, heads[own.module] = _spread(weights, own, other, shares[other])
            weights |= spread
        places = {place: head for head, place in enumerate(heads[own.module])}
        layers[own.site.stack, own.site.layer] = [places.get(h) for h in range(other.site.n_heads)]
    known = {ORIGINAL: compose_heads(model, layers)} if original_heads(model) else {}
    biased = [{"attention_bias": True}] if hasattr(config, "attention_bias") else []
    for more in [{}, *biased]:
        try:
            return rebuild(
                cls, cls.config_class.from_dict(config.to_dict() | known | more), weights
            )
        except ValueError as error:
            why = error
    raise UnsupportedError(
        f"save: {cls.__name__} has no place for all of its weights at its old size ({why}): "
        f"prune without fold, or choose the format 'headwise' or 'remote-code'."
    )


def _spread(
    weights: Mapping[str, Tensor], own: Attention, other: Attention, shares: Sequence[OwnershipMap]
) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """The weights of an attention at their places in the larger one: `cut`, run backwards.

    Returns:
        The weights, and the place of each head.
    """
    counts = count_heads(other, shares)
    held = [share for share in shares if share.name in weights]
    if OwnHeads.on(own.module) is not None:  # what is made for the whole stack was left whole
        held = [share for share in held if not is_bias_table(share)]
    sizes = [weights[share.name].shape[share.axis] for share in held]
    for keep in _ways(own, counts):
        places = [kept_indices(share, counts, keep) for share in held]
        if [len(at) for at in places] == sizes:
            spread = {share.name: weights[share.name] for share in held}
            for share, at in zip(held, places, strict=True):
                spread[share.name] = _put(spread[share.name], share, at)
            return spread, keep.heads
    raise UnsupportedError(
        f"save: {own.site.name} has more kv heads than the {counts.kv_heads} that its "
        f"configuration gives room for. Choose the format 'headwise' or 'remote-code'."
    )


def _ways(own: Attention, counts: HeadCounts) -> Iterator[Keep]:
    """The ways in which heads can stand in a larger attention: where they must, or in groups."""
    bound, n_heads = OwnHeads.on(own.module), own.site.n_heads
    if bound is not None:
        group = counts.heads // counts.kv_heads
        yield Keep(tuple(bound.heads), tuple(sorted({head // group for head in bound.heads})))
    group = counts.heads // counts.kv_heads
    for kv_heads in range(counts.kv_heads, 0, -1):
        size = n_heads // kv_heads
        if size * kv_heads == n_heads and size <= group:
            heads = (kv * group + at for kv in range(kv_heads) for at in range(size))
            yield Keep(tuple(heads), tuple(range(kv_heads)))


def _put(weight: Tensor, share: OwnershipMap, at: Tensor) -> Tensor:
    shape = list(weight.shape)
    shape[share.axis] = len(share.heads)
    return weight.new_zeros(shape).index_copy(share.axis, at.to(weight.device), weight)
