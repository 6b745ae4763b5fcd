"""`costs`: counts, and on demand times, what each head of a model costs.

`headwise.counts` has the same counts by sizes alone, for models that are not there.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from headwise._evaluation import in_evaluation
from headwise.capture import AttentionCall, capture_calls
from headwise.checkpoints import replace_torch_layers
from headwise.lab import MiniGPT
from headwise.layer import MultiHeadAttention
from headwise.models import (
    cache_in,
    check_model,
    check_weights,
    copy_model,
    device_of,
    fingerprint,
    hooked,
)
from headwise.ownership import (
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
from headwise.surgery._costs import Costs
from headwise.surgery._prune import prune
from headwise.tables import Head

# Our models that cache keys and values when they generate; other models without a configuration
# keep no cache.
_WITH_CACHE = (MiniGPT, MultiHeadAttention)
# Smaller models that keep these shares of the heads of every layer are timed beside the model.
_SHARES = (0.75, 0.5, 0.25)


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
    equivalent = replace_torch_layers(copy_model("costs", model), of_torch) if of_torch else model
    layers = find_attentions(equivalent, batch) if of_torch else attentions
    ownership = find_ownership(equivalent, layers, batch)
    counts = [count_heads(layer, ownership[layer]) for layer in layers]
    calls = _calls(model, layers, counts, batch)
    parts = [
        _columns(equivalent, layer, heads, ownership[layer], *call)
        for layer, heads, call in zip(layers, counts, calls, strict=True)
    ]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    kv_heads, own_entries, shared_entries, own_work, shared_work, cache = columns
    own = {"parameters": own_entries, "multiply_adds": own_work}
    shared = {"parameters": shared_entries, "multiply_adds": shared_work}
    if cache.any() and not np.isnan(cache).any():
        own["cache_bytes"], shared["cache_bytes"] = np.zeros(len(cache)), cache
    return Costs(
        heads=tuple(heads_of(attentions)),
        kv_heads=kv_heads.astype(np.int64),
        own=own,
        shared=shared,
        model=fingerprint(model),
        seconds=_seconds(model, attentions, batch) if timed else {},
    )


@torch.no_grad()
def _calls(
    model: nn.Module, attentions: Sequence[Attention], counts: Sequence[HeadCounts], batch: Any
) -> list[tuple[AttentionCall, float]]:
    """The call of each attention, and the numbers it caches per token and kv head.

    They are NaN where the cache holds latents that all heads share.
    """
    calls: list[AttentionCall] = []
    with in_evaluation(model), capture_calls(model, calls.append):
        output = call_model(model, batch)
    # A copy: an output of transformers warns of the earlier name, also where it has neither.
    cache = cache_in(dict(output)) if isinstance(output, Mapping) else None
    has_cache = cache is not None if hasattr(model, "config") else isinstance(model, _WITH_CACHE)
    layers = getattr(cache, "layers", [])
    if len(layers) != len(calls):  # a cache of two stacks, which holds no latents
        layers = [None] * len(calls)
    cached = []
    for attention, heads, call, layer in zip(attentions, counts, calls, layers, strict=True):
        width = call.k.shape[-1] + call.v.shape[-1]
        numbers = float(width if has_cache and attention.site.stack != "encoder" else 0)
        if hasattr(layer, "keys"):
            kept = sum(x.shape[1] * x.shape[3] for x in (layer.keys, layer.values))
            numbers = np.nan if kept < width * heads.kv_heads else kept / heads.kv_heads
        cached.append(numbers)
    return list(zip(calls, cached, strict=True))


def _columns(
    model: nn.Module,
    attention: Attention,
    counts: HeadCounts,
    ownership: Sequence[OwnershipMap],
    call: AttentionCall,
    cached: float,
) -> tuple[Float64[np.ndarray, " H"], ...]:
    """Of each head: its kv head, own and shared entries of weights, own and shared work, cache."""
    H, kv_heads = counts.heads, np.arange(counts.heads) * counts.kv_heads // counts.heads
    parameters = dict(model.named_parameters(remove_duplicate=False))
    entries = np.zeros((2, 2, H))  # of all weights and of matrices; own and shared
    for owner in ownership:
        if owner.name in parameters:  # and is no buffer
            weight = parameters[owner.name]
            heads, kv = owner.heads.numpy(force=True), owner.kv_heads.numpy(force=True)
            own = np.bincount(heads[heads >= 0], minlength=H)
            shared = np.bincount(kv[(heads < 0) & (kv >= 0)], minlength=counts.kv_heads)[kv_heads]
            both = np.stack([own, shared]) * (weight.numel() // weight.shape[owner.axis])
            entries += np.stack([both, both * (weight.ndim > 1)])
    queries, keys = call.q.shape[2], call.k.shape[2]
    pairs = queries * keys * (call.k.shape[-1] + call.v.shape[-1])
    (own, shared), (own_factors, shared_factors) = entries
    # Layers that share weights store them once, but each computes with them.
    stored = 0 if attention.nth else 1
    return (
        kv_heads.astype(np.float64),
        stored * own,
        stored * shared,
        queries * own_factors + pairs,
        keys * shared_factors,
        np.full(H, attention.output.weight.element_size() * cached),
    )


def _seconds(
    model: nn.Module, attentions: Sequence[Attention], batch: Any
) -> dict[tuple[str, int], Float64[np.ndarray, " _"]]:
    """Measure the seconds of each layer's attention block with 0, 1, 2, ... heads.

    A block without heads gets the time of the smallest block that was measured.
    """
    numbers = [[_heads_kept(a, share) for a in attentions] for share in (1.0, *_SHARES)]
    models = [model]
    for kept in numbers[1:]:
        removed = [
            Head(a.site.stack, a.site.layer, head)
            for a, number in zip(attentions, kept, strict=True)
            for head in range(number, a.site.n_heads)
        ]
        models.append(prune(model, removed))
    times = [pass_times.blocks for pass_times in time_passes(models, batch)]
    seconds = {}
    for index, attention in enumerate(attentions):
        # Two shares may keep the same number of heads.
        by_number: dict[int, list[float]] = {}
        for kept, blocks in zip(numbers, times, strict=True):
            by_number.setdefault(kept[index], []).append(blocks[index])
        measured = sorted(by_number)
        means = [float(np.mean(by_number[number])) for number in measured]
        site = attention.site
        seconds[site.stack, site.layer] = np.interp(np.arange(site.n_heads + 1), measured, means)
    return seconds


def _heads_kept(attention: Attention, share: float) -> int:
    """About this share of the heads of a layer, in whole groups."""
    site = attention.site
    unit = site.n_heads // site.n_kv_heads if site.n_kv_heads > 1 else 1
    return unit * max(1, round(share * site.n_heads / unit))


@dataclass(frozen=True)
class PassTimes:
    """Medians over forward passes, in seconds.

    Attributes:
        whole: The time of the whole pass.
        blocks: The time of each attention block: projections, attention, and what else is in
            the block's module, such as a norm.
    """

    whole: float
    blocks: tuple[float, ...]


@torch.no_grad()
def time_passes(
    models: Sequence[nn.Module],
    batch: Any,
    passes: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> list[PassTimes]:
    """Time forward passes of several models in turn, so that all meet the same noise.

    Whole passes and blocks are timed in separate passes, since reading the clock takes time too.
    The models run in evaluation mode.

    Args:
        batch: The input of every pass.
        passes: The number of passes of each kind that the medians are taken over.
        clock: Returns the time in seconds. `time.process_time` excludes other processes.
    """

    def now(model: nn.Module) -> float:
        if device_of(model).type == "cuda":
            torch.cuda.synchronize()
        return clock()

    attentions = [find_attentions(model, batch) for model in models]
    whole: list[list[float]] = [[] for _ in models]
    blocks: list[list[list[float]]] = [[] for _ in models]
    with in_evaluation(*models):
        for index, model in (passes + 1) * [*enumerate(models)]:
            started = now(model)
            call_model(model, batch)
            whole[index].append(now(model) - started)
            with _timed_blocks(model, attentions[index], partial(now, model)) as times:
                call_model(model, batch)
            blocks[index].append(times)
    # The first pass is a warm-up.
    return [
        PassTimes(
            statistics.median(seconds[1:]),
            tuple(statistics.median(block[1:]) for block in zip(*per_pass, strict=True)),
        )
        for seconds, per_pass in zip(whole, blocks, strict=True)
    ]


@contextmanager
def _timed_blocks(
    model: nn.Module, attentions: Sequence[Attention], now: Callable[[], float]
) -> Iterator[list[float]]:
    """The time of each attention block, in the order of their calls."""
    started: list[float] = []
    seconds: list[float] = []

    def start(*_: Any) -> None:
        started.append(now())

    def stop(*_: Any) -> None:
        seconds.append(now() - started.pop())

    blocks = [model.get_submodule(a) for a in dict.fromkeys(a.around for a in attentions)]
    with hooked([(block, start) for block in blocks], [(block, stop) for block in blocks]):
        yield seconds
