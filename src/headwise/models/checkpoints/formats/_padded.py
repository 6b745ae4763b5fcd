"""A pruned model at its old size: zeros in place of the removed heads."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models._model import device_of
from headwise.models.checkpoints._original_heads import ORIGINAL, compose_heads, original_heads
from headwise.models.checkpoints.formats._resize import BiasHeads, is_bias_table
from headwise.models.checkpoints.formats._stock import rebuild
from headwise.models.ownership import (
    Attention,
    HeadCounts,
    KeptHeads,
    OwnershipMap,
    count_heads,
    find_attentions,
    find_ownership,
    kept_indices,
    spread,
)


def as_padded(model: nn.Module, batch: Any) -> nn.Module:
    """The model that the configuration builds, with the outputs of the pruned one.

    It is as large and as slow as the model was before pruning.

    Args:
        batch: An input to run both on.
    Returns:
        A model to be written, not to be run.
    Raises:
        UnsupportedError: the configuration leaves no room, as for kv heads that were copied for
            single query heads, or for a mean that was folded into a bias that it does not have.
    """
    cls: Any = type(model)
    config: Any = model.config
    with torch.random.fork_rng():  # building draws random weights, which are not used
        full = cls(config).to(device_of(model))
    weights = {name: x.detach() for name, x in model.state_dict().items()}
    full_attentions = find_attentions(full, batch)
    maps = find_ownership(full, full_attentions, batch)
    kept: dict[nn.Module, Sequence[int]] = {}
    layers: dict[tuple[str, int], list[int | None]] = {}
    for attention, larger in zip(find_attentions(model, batch), full_attentions, strict=True):
        site = attention.site
        if attention.nth == 0:
            padded, kept[attention.module] = _pad(weights, attention, larger, maps[larger])
            weights |= padded
        pruned = {head: number for number, head in enumerate(kept[attention.module])}
        layers[site.stack, site.layer] = [pruned.get(head) for head in range(larger.site.n_heads)]
    original = {ORIGINAL: compose_heads(model, layers)} if original_heads(model) else {}
    biased = [{"attention_bias": True}] if hasattr(config, "attention_bias") else []
    for more in [{}, *biased]:
        try:
            return rebuild(
                cls, cls.config_class.from_dict(config.to_dict() | original | more), weights
            )
        except ValueError as error:
            why = error
    raise UnsupportedError(
        f"save: {cls.__name__} has no place for all of its weights at its old size ({why}): "
        f"prune without fold, or choose the format 'headwise' or 'remote-code'."
    )


def _pad(
    weights: Mapping[str, Tensor],
    attention: Attention,
    larger: Attention,
    maps: Sequence[OwnershipMap],
) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """The weights of an attention spread over those of the larger one: cutting in reverse.

    Returns:
        The weights, and for each head its number in the larger attention.
    """
    counts = count_heads(larger, maps)
    held = [owners for owners in maps if owners.name in weights]
    if BiasHeads.on(attention.module) is not None:  # the biases of the stack were not cut
        held = [owners for owners in held if not is_bias_table(owners.name)]
    sizes = [weights[owners.name].shape[owners.axis] for owners in held]
    for kept in _placements(attention, counts):
        indices = [kept_indices(owners, counts, kept) for owners in held]
        if [len(index) for index in indices] == sizes:
            padded = {owners.name: weights[owners.name] for owners in held}
            for owners, index in zip(held, indices, strict=True):
                padded[owners.name] = spread(padded[owners.name], owners, index)
            return padded, kept.heads
    raise UnsupportedError(
        f"save: {attention.site.name} has more kv heads than the {counts.kv_heads} that its "
        f"configuration gives room for. Choose the format 'headwise' or 'remote-code'."
    )


def _placements(attention: Attention, counts: HeadCounts) -> Iterator[KeptHeads]:
    """The heads of the larger attention that may hold those of the pruned one.

    Heads with position biases of their own keep their numbers; others may fill groups.
    """
    bias_heads, n_heads = BiasHeads.on(attention.module), attention.site.n_heads
    group = counts.heads // counts.kv_heads
    if bias_heads is not None:
        kv_heads = sorted({head // group for head in bias_heads.heads})
        yield KeptHeads(tuple(bias_heads.heads), tuple(kv_heads))
    for n_kv_heads in range(counts.kv_heads, 0, -1):
        size = n_heads // n_kv_heads
        if size * n_kv_heads == n_heads and size <= group:
            heads = (kv * group + nth for kv in range(n_kv_heads) for nth in range(size))
            yield KeptHeads(tuple(heads), tuple(range(n_kv_heads)))
