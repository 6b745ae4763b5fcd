"""How long the attention of each layer takes with fewer and fewer heads: measured, not guessed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64
from torch import nn

from headwise.models import Attention
from headwise.surgery._prune import prune
from headwise.surgery.pricing._time import time_passes
from headwise.tables import Head

# Smaller models that keep these shares of the heads of every layer are timed beside the model.
_SHARES = (0.75, 0.5, 0.25)


def measure_seconds(
    model: nn.Module, attentions: Sequence[Attention], batch: Any
) -> dict[tuple[str, int], Float64[np.ndarray, " _"]]:
    """Of each layer, the seconds that its attention block takes with 0, 1, 2, ... heads.

    With none it is taken to cost what the least cost that was measured.
    """
    numbers = [[_kept(a, share) for a in attentions] for share in (1.0, *_SHARES)]
    models = [model, *(_smaller(model, attentions, kept) for kept in numbers[1:])]
    times = [one.blocks for one in time_passes(models, batch)]
    found = {}
    for at, attention in enumerate(attentions):
        # Two shares may keep as many heads.
        seconds: dict[int, list[float]] = {}
        for kept, blocks in zip(numbers, times, strict=True):
            seconds.setdefault(kept[at], []).append(blocks[at])
        known = sorted(seconds)
        means = [float(np.mean(seconds[kept])) for kept in known]
        site = attention.site
        found[site.stack, site.layer] = np.interp(np.arange(site.n_heads + 1), known, means)
    return found


def _kept(attention: Attention, share: float) -> int:
    """About this share of the heads of a layer, in whole groups."""
    site = attention.site
    unit = site.n_heads // site.n_kv_heads if site.n_kv_heads > 1 else 1
    return unit * max(1, round(share * site.n_heads / unit))


def _smaller(model: nn.Module, attentions: Sequence[Attention], kept: Sequence[int]) -> nn.Module:
    gone = [
        Head(a.site.stack, a.site.layer, head)
        for a, left in zip(attentions, kept, strict=True)
        for head in range(left, a.site.n_heads)
    ]
    return prune(model, gone)
