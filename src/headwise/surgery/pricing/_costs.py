"""`costs`: counts and measures what each head of a model costs."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise._progress import shows_progress
from headwise.lab import MiniGPT
from headwise.layer import MultiHeadAttention
from headwise.models import (
    AttentionCall,
    cache_in,
    capture_calls,
    check_model,
    check_weights,
    fingerprint,
)
from headwise.models.checkpoints import replace_torch_layers
from headwise.models.ownership import (
    Attention,
    HeadCounts,
    OwnershipMap,
    call_model,
    count_heads,
    find_attentions,
    find_ownership,
    first_batch,
    heads_of,
)
from headwise.surgery.pricing._cost_table import Costs
from headwise.surgery.pricing._seconds import measure_seconds

# Our models that cache keys and values when they generate; other models without a configuration
# keep no cache.
_WITH_CACHE = (MiniGPT, MultiHeadAttention)

_COLUMNS = ("kv_head", "own", "shared", "own work", "shared work", "cache")


@shows_progress("Measuring the costs of heads")
@torch.inference_mode(False)
def costs(model: nn.Module, reference: Any = None, *, timed: bool = False) -> Costs:
    """Count what each head of a model costs, by name; with `timed`, measure time as well.

    `parameters`: without those that all heads of a layer share.
    `multiply_adds`: for one text of the reference, two FLOPs each; every query-key pair counts.
    `cache_bytes`: of the keys and values of one token, as the model keeps them, in the dtype of
    its weights. It is missing for a model without a cache, such as an encoder, and for one that
    caches latents that all heads share.
    `seconds`: of the attention blocks, projections included, in one pass over the batch: medians
    over passes that alternate with those of smaller models. Times between the measured numbers
    of heads are interpolated linearly.

    Args:
        reference: Batches, each the model's keyword arguments, a tuple of arguments or a single
            argument; the first one is run. None is a short made-up text. Times hold for this
            batch: give one of the size that matters to you.
    Raises:
        ArgumentError: the reference is empty or holds texts, or there is none and no input can
            be made up.
        UnsupportedError: the weights of each head cannot be found, or `timed` and the model's
            heads cannot be removed.
    """
    model = check_model("costs", model)
    check_weights("costs", model)
    batch = first_batch(model, reference, "costs")
    attentions = find_attentions(model, batch)
    # Torch's own layers do not expose their heads; our equivalents cost the same.
    of_torch = [attention.site.name for attention in attentions if not attention.called]
    equivalent = replace_torch_layers(deepcopy(model), of_torch) if of_torch else model
    layers = find_attentions(equivalent, batch) if of_torch else attentions
    ownership = find_ownership(equivalent, layers, batch)
    counts = {layer: count_heads(layer, ownership[layer]) for layer in layers}
    rows = [
        row
        for layer, sizes in zip(layers, _call_sizes(model, layers, counts, batch), strict=True)
        for row in _rows(equivalent, layer, counts[layer], ownership[layer], sizes)
    ]
    columns = dict(zip(_COLUMNS, np.array(rows, dtype=np.float64).T, strict=True))
    own = {"parameters": columns["own"], "multiply_adds": columns["own work"]}
    shared = {"parameters": columns["shared"], "multiply_adds": columns["shared work"]}
    if columns["cache"].any() and not np.isnan(columns["cache"]).any():
        own["cache_bytes"], shared["cache_bytes"] = np.zeros(len(rows)), columns["cache"]
    return Costs(
        heads=tuple(heads_of(attentions)),
        kv_heads=columns["kv_head"].astype(np.int64),
        own=own,
        shared=shared,
        model=fingerprint(model),
        seconds=measure_seconds(model, attentions, batch) if timed else {},
    )


@dataclass(frozen=True)
class _CallSizes:
    """The sizes of one call of an attention.

    Attributes:
        width: The width of a key and a value together.
        cached: The numbers that are cached per token and kv head; NaN where the cache holds
            latents that all heads share.
    """

    queries: int
    keys: int
    width: int
    cached: float


def _rows(
    model: nn.Module,
    attention: Attention,
    counts: HeadCounts,
    ownership: Sequence[OwnershipMap],
    sizes: _CallSizes,
) -> Iterator[tuple[float, ...]]:
    """The columns of each head of an attention."""
    # Layers that share weights store them once, but each computes with them.
    stored = 0 if attention.nth else 1
    weights = [owner for owner in ownership if _is_parameter(model, owner)]
    matrices = [owner for owner in weights if model.get_parameter(owner.name).ndim > 1]
    pairs = sizes.queries * sizes.keys * sizes.width
    cache = attention.output.weight.element_size() * sizes.cached
    for head in range(counts.heads):
        kv_head = head * counts.kv_heads // counts.heads
        own, shared = _count_entries(model, weights, head, kv_head)
        own_factors, shared_factors = _count_entries(model, matrices, head, kv_head)
        work = sizes.queries * own_factors + pairs, sizes.keys * shared_factors
        yield kv_head, stored * own, stored * shared, *work, cache


def _count_entries(
    model: nn.Module, ownership: Sequence[OwnershipMap], head: int, kv_head: int
) -> tuple[int, int]:
    """The number of weight entries that a head owns, and that its kv head owns."""
    own = sum(_entries(model, owner, owner.heads == head) for owner in ownership)
    shared = sum(
        _entries(model, owner, (owner.kv_heads == kv_head) & (owner.heads < 0))
        for owner in ownership
    )
    return own, shared


def _entries(model: nn.Module, owner: OwnershipMap, selected: Tensor) -> int:
    """The number of entries of a weight at the selected indices of its axis."""
    weight = model.get_parameter(owner.name)
    return int(selected.sum()) * weight.numel() // weight.shape[owner.axis]


def _is_parameter(model: nn.Module, owner: OwnershipMap) -> bool:
    return owner.name in dict(model.named_parameters(remove_duplicate=False))


@torch.no_grad()
def _call_sizes(
    model: nn.Module,
    attentions: Sequence[Attention],
    counts: Mapping[Attention, HeadCounts],
    batch: Any,
) -> list[_CallSizes]:
    """The sizes of the call of each attention."""
    calls: list[AttentionCall] = []
    with in_evaluation(model), capture_calls(model, calls.append):
        output = call_model(model, batch)
    cache = cache_in(output) if isinstance(output, Mapping) else None
    has_cache = cache is not None if hasattr(model, "config") else isinstance(model, _WITH_CACHE)
    layers = getattr(cache, "layers", [])
    if len(layers) != len(calls):  # a cache of two stacks, which holds no latents
        layers = [None] * len(calls)
    sizes = []
    for attention, call, layer in zip(attentions, calls, layers, strict=True):
        width = call.k.shape[-1] + call.v.shape[-1]
        cached = float(width if has_cache and attention.site.stack != "encoder" else 0)
        if hasattr(layer, "keys"):
            per_kv_head = _cached_per_token(layer) / counts[attention].kv_heads
            cached = float("nan") if per_kv_head < width else per_kv_head
        sizes.append(_CallSizes(call.q.shape[2], call.k.shape[2], width, cached))
    return sizes


def _cached_per_token(layer: Any) -> int:
    """The numbers that a cache layer holds for one token."""
    return sum(x.shape[1] * x.shape[3] for x in (layer.keys, layer.values))
