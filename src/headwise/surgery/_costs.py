"""What each head of a model costs: what a plan needs to keep a budget."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.heads import Head
from headwise.models import (
    Attention,
    Share,
    call_with,
    example_of,
    find_attentions,
    find_shares,
    fingerprint,
    heads_of,
    in_evaluation,
    listen,
)


@dataclass(frozen=True, eq=False)
class Costs:
    """What goes with each head, and with each key/value head when its last head goes.

    Attributes:
        heads: The address of each head.
        kv_heads: The key/value head of its layer that each head reads.
        own: By name what goes with a head itself.
        shared: By name what goes once none reads its key/value head.
        model: The fingerprint of the model's weights.
    """

    heads: tuple[Head, ...]
    kv_heads: Int64[np.ndarray, " N"]
    own: Mapping[str, Float64[np.ndarray, " N"]]
    shared: Mapping[str, Float64[np.ndarray, " N"]]
    model: str = ""

    def after(self, removed: Iterable[Head], name: str) -> float:
        """What all heads cost when some are gone.

        Raises:
            ArgumentError: there is no cost of this name.
        """
        if name not in self.own:
            raise ArgumentError(f"costs: {name!r} is none of {', '.join(self.own)}. Give one.")
        gone = set(removed)
        left = [row for row, head in enumerate(self.heads) if head not in gone]
        read = {
            (self.heads[row].stack, self.heads[row].layer, int(self.kv_heads[row])): row
            for row in left
        }
        return float(self.own[name][left].sum() + self.shared[name][[*read.values()]].sum())


def costs(model: nn.Module, batch: Any = None) -> Costs:
    """Count what each head of a model costs: parameters, and bytes of cache for each token.

    Parameters that all heads of a layer share are counted with none. The bytes are those of
    keys and values as the model keeps them, in the dtype of its weights.

    Args:
        batch: What to run the model on once; None is a short text made up for it.
    Raises:
        UnsupportedError: which weight belongs to which head cannot be found.
    """
    batch = example_of(model) if batch is None else batch
    attentions = find_attentions(model, batch)
    shares = find_shares(model, attentions, batch)
    widths = _widths(model, attentions, batch)
    rows = [row for one in attentions for row in _rows(model, one, shares[one], widths[one])]
    columns = dict(zip(_COLUMNS, np.array(rows, dtype=np.float64).T, strict=True))
    return Costs(
        heads=tuple(heads_of(attentions)),
        kv_heads=columns["kv_head"].astype(np.int64),
        own={"parameters": columns["own"], "cache_bytes": np.zeros(len(rows))},
        shared={"parameters": columns["shared"], "cache_bytes": columns["cache"]},
        model=fingerprint(model),
    )


_COLUMNS = ("kv_head", "own", "shared", "cache")


def _rows(
    model: nn.Module, attention: Attention, shares: Sequence[Share], width: int
) -> Iterator[tuple[int, int, int, int]]:
    """The columns of each head of an attention."""
    site = attention.site
    size = attention.output.weight.element_size()
    # Layers that share their weights have them once.
    counted = [] if attention.nth else [one for one in shares if _is_parameter(model, one)]
    for head in range(site.n_heads):
        kv_head = head * site.n_kv_heads // site.n_heads
        own = sum(_entries(model, one, one.heads == head) for one in counted)
        shared = sum(
            _entries(model, one, (one.kv_heads == kv_head) & (one.heads < 0)) for one in counted
        )
        yield kv_head, own, shared, size * width


def _entries(model: nn.Module, share: Share, chosen: Tensor) -> int:
    """How many numbers of a weight lie at the chosen indices of its axis."""
    weight = model.get_parameter(share.name)
    return int(chosen.sum()) * weight.numel() // weight.shape[share.axis]


def _is_parameter(model: nn.Module, share: Share) -> bool:
    return share.name in dict(model.named_parameters(remove_duplicate=False))


def _widths(model: nn.Module, attentions: list[Attention], batch: Any) -> dict[Attention, int]:
    """How many numbers a key and its value are, in one kv head of each attention."""
    heard: list[int] = []
    with (
        torch.no_grad(),
        in_evaluation(model),
        listen(model, lambda call: heard.append(call.k.shape[-1] + call.v.shape[-1])),
    ):
        call_with(model, batch)
    return dict(zip(attentions, heard, strict=True))
