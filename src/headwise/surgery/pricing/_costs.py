"""What each head of a model costs: what a plan needs to keep a budget."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from headwise._display import counted
from headwise.errors import ArgumentError
from headwise.files import build_from, read_object, write_beside
from headwise.lab import MiniGPT
from headwise.layer import MultiHeadAttention
from headwise.models import (
    Attention,
    AttentionCall,
    HeadCounts,
    OwnershipMap,
    call_model,
    capture_calls,
    check_model,
    count_heads,
    example_input,
    find_attentions,
    find_ownership,
    fingerprint,
    heads_of,
    in_evaluation,
)
from headwise.surgery._plan import amount
from headwise.surgery.cutting import replace_torch_layers
from headwise.surgery.pricing._seconds import measure_seconds
from headwise.tables import Head

FORMAT = "headwise-costs/1"


@dataclass(frozen=True, eq=False)
class Costs:
    """What goes with each head, and with each key/value head when its last head goes.

    Attributes:
        heads: The address of each head.
        kv_heads: The key/value head of its layer that each head reads.
        own: By name what goes with a head itself.
        shared: By name what goes once none reads its key/value head.
        model: The fingerprint of the model's weights.
        seconds: Of each layer, how long its attention block takes with 0, 1, 2, ... heads; empty
            where no time was measured.
    """

    heads: tuple[Head, ...]
    kv_heads: Int64[np.ndarray, " N"]
    own: Mapping[str, Float64[np.ndarray, " N"]]
    shared: Mapping[str, Float64[np.ndarray, " N"]]
    model: str = ""
    seconds: Mapping[tuple[str, int], Float64[np.ndarray, " _"]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """What is known of this model."""
        return (*self.own, *(["seconds"] if self.seconds else []))

    def __str__(self) -> str:
        """What all heads cost together."""
        whole = {name: self.after((), name) for name in self.names}
        told = (f"{name} {amount(x)}" for name, x in whole.items())
        return f"{counted(len(self.heads), 'head')}: {', '.join(told)}"

    def __repr__(self) -> str:
        return f"Costs of {self}"

    def save(self, path: str | Path) -> Path:
        """Write what was counted and measured as JSON.

        Raises:
            OutputError: the file cannot be written.
        """
        content = {
            "format": FORMAT,
            "model": self.model,
            "heads": [str(head) for head in self.heads],
            "kv_heads": self.kv_heads.tolist(),
            "own": {name: values.tolist() for name, values in self.own.items()},
            "shared": {name: values.tolist() for name, values in self.shared.items()},
            "seconds": [[*layer, values.tolist()] for layer, values in self.seconds.items()],
        }
        with write_beside(path) as beside:
            beside.write_text(json.dumps(content) + "\n", "utf-8")
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Costs":
        """Read costs that `save` wrote.

        Raises:
            InputError: the file is missing or holds no costs.
        """
        who, what, advice = "Costs.load", "holds no costs", "Give a file that Costs.save wrote."
        content = read_object(path, who, advice, what)
        return build_from(lambda: _from_json(content), f"{who}: {path} {what}", advice)

    def after(self, removed: Iterable[Head], name: str) -> float:
        """What all heads cost when some are gone.

        Raises:
            ArgumentError: there is no cost of this name.
        """
        if name not in self.names:
            why = _WHY_NOT.get(name, "")
            raise ArgumentError(
                f"costs: {name!r} is none of {', '.join(self.names)}. {why}Give one of them."
            )
        gone = set(removed)
        left = [row for row, head in enumerate(self.heads) if head not in gone]
        if name == "seconds":
            kept = Counter((self.heads[row].stack, self.heads[row].layer) for row in left)
            return float(sum(self.seconds[layer][n] for layer, n in kept.items()))
        read = {
            (self.heads[row].stack, self.heads[row].layer, int(self.kv_heads[row])): row
            for row in left
        }
        return float(self.own[name][left].sum() + self.shared[name][[*read.values()]].sum())


def _from_json(content: Mapping[str, Any]) -> Costs:
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')!r}, not {FORMAT!r}")
    heads = tuple(Head.parse(name) for name in content["heads"])
    own, shared = (
        {str(name): _column(values, heads) for name, values in content[part].items()}
        for part in ("own", "shared")
    )
    if own.keys() != shared.keys():
        raise ValueError(f"heads have {sorted(own)}, their key/value heads {sorted(shared)}")
    seconds = {
        (str(stack), int(layer)): np.array(values, dtype=np.float64)
        for stack, layer, values in content["seconds"]
    }
    in_layers = Counter((head.stack, head.layer) for head in heads)
    for layer, n in in_layers.items():
        if seconds and (layer not in seconds or seconds[layer].shape != (n + 1,)):
            raise ValueError(f"no seconds of 0 to {n} heads of the layer {layer}")
    kv_heads = _column(content["kv_heads"], heads)
    if not ((kv_heads == np.floor(kv_heads)) & (abs(kv_heads) < 2.0**53)).all():
        raise ValueError(f"kv_heads are {content['kv_heads']}, not all whole numbers")
    return Costs(heads, kv_heads.astype(np.int64), own, shared, str(content["model"]), seconds)


def _column(values: Any, heads: Sequence[Head]) -> Float64[np.ndarray, " N"]:
    column = np.array(values, dtype=np.float64)
    if column.shape != (len(heads),):
        raise ValueError(f"{column.size} numbers for {len(heads)} heads")
    return column


# Models of ours that keep keys and values as they generate; others of torch keep none.
_WITH_CACHE = (MiniGPT, MultiHeadAttention)

_WHY_NOT = {
    "cache_bytes": "The model keeps no cache, or latents that all heads share. ",
    "seconds": "Time is measured by headwise.costs(model, batch, timed=True). ",
}


def costs(model: nn.Module, batch: Any = None, *, timed: bool = False) -> Costs:
    """Count what each head of a model costs, by name; with `timed` measure how long heads take.

    `parameters`: those that all heads of a layer share are counted with none.
    `multiply_adds`: of one text of the batch, two FLOPs each; every pair of query and key counts.
    `cache_bytes`: of the keys and values of one token, as the model keeps them, in the dtype of its
    weights; not there where the model keeps none, as an encoder, or latents that all heads share.
    `seconds`: of the attention blocks, projections included, in one pass over the batch: medians of
    passes in which smaller models take turns. Between the numbers of heads that were measured,
    a line is drawn.

    Args:
        batch: What to run the model on; None is a short text made up for it. Times are those
            of this batch: give one of the size that counts.
    Raises:
        UnsupportedError: which weight belongs to which head cannot be found, or `timed` and
            heads of the model cannot be cut out.
    """
    model = check_model("costs", model)
    batch = example_input(model) if batch is None else batch
    attentions = find_attentions(model, batch)
    # Torch's own layers show nobody their heads; ours in their place cost the same.
    theirs = [one.site.name for one in attentions if not one.called]
    like = replace_torch_layers(deepcopy(model), theirs) if theirs else model
    parts = find_attentions(like, batch) if theirs else attentions
    shares = find_ownership(like, parts, batch)
    counts = {one: count_heads(one, shares[one]) for one in parts}
    rows = [
        row
        for one, size in zip(parts, _sizes(model, parts, counts, batch), strict=True)
        for row in _rows(like, one, counts[one], shares[one], size)
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


_COLUMNS = ("kv_head", "own", "shared", "own work", "shared work", "cache")


@dataclass(frozen=True)
class _Sizes:
    """Of one call of an attention.

    Attributes:
        width: Of a key and a value together.
        cached: How many numbers are kept of a token for each kv head; NaN where what is kept are
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
    shares: Sequence[OwnershipMap],
    sizes: _Sizes,
) -> Iterator[tuple[float, ...]]:
    """The columns of each head of an attention."""
    # Layers that share their weights have them once, and work with them each.
    once = 0 if attention.nth else 1
    held = [one for one in shares if _is_parameter(model, one)]
    matrices = [one for one in held if model.get_parameter(one.name).ndim > 1]
    pairs = sizes.queries * sizes.keys * sizes.width
    cache = attention.output.weight.element_size() * sizes.cached
    for head in range(counts.heads):
        kv_head = head * counts.kv_heads // counts.heads
        own, shared = _held(model, held, head, kv_head)
        used, used_together = _held(model, matrices, head, kv_head)
        work = sizes.queries * used + pairs, sizes.keys * used_together
        yield kv_head, once * own, once * shared, *work, cache


def _held(
    model: nn.Module, shares: Sequence[OwnershipMap], head: int, kv_head: int
) -> tuple[int, int]:
    """How many numbers of weights are a head's own, and its kv head's."""
    own = sum(_entries(model, one, one.heads == head) for one in shares)
    of_kv = [(one, (one.kv_heads == kv_head) & (one.heads < 0)) for one in shares]
    return own, sum(_entries(model, one, chosen) for one, chosen in of_kv)


def _entries(model: nn.Module, share: OwnershipMap, chosen: Tensor) -> int:
    """How many numbers of a weight lie at the chosen indices of its axis."""
    weight = model.get_parameter(share.name)
    return int(chosen.sum()) * weight.numel() // weight.shape[share.axis]


def _is_parameter(model: nn.Module, share: OwnershipMap) -> bool:
    return share.name in dict(model.named_parameters(remove_duplicate=False))


@torch.no_grad()
def _sizes(
    model: nn.Module,
    attentions: Sequence[Attention],
    counts: Mapping[Attention, HeadCounts],
    batch: Any,
) -> list[_Sizes]:
    """The sizes of the call of each attention."""
    heard: list[AttentionCall] = []
    with in_evaluation(model), capture_calls(model, heard.append):
        output = call_model(model, batch)
    cache = getattr(output, "past_key_values", None)
    keeps = cache is not None if hasattr(model, "config") else isinstance(model, _WITH_CACHE)
    layers = getattr(cache, "layers", [])
    if len(layers) != len(heard):  # of two stacks, which keep no latents
        layers = [None] * len(heard)
    found = []
    for attention, call, layer in zip(attentions, heard, layers, strict=True):
        width = call.k.shape[-1] + call.v.shape[-1]
        cached = float(width if keeps and attention.site.stack != "encoder" else 0)
        if hasattr(layer, "keys"):
            kept = _cached(layer) / counts[attention].kv_heads
            cached = float("nan") if kept < width else kept
        found.append(_Sizes(call.q.shape[2], call.k.shape[2], width, cached))
    return found


def _cached(layer: Any) -> int:
    """How many numbers a layer of a cache keeps of one token."""
    return sum(x.shape[1] * x.shape[3] for x in (layer.keys, layer.values))
