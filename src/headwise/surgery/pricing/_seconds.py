"""Measured times of each layer's attention block with fewer and fewer heads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64
from torch import nn

from headwise.models.ownership import Attention
from headwise.surgery._prune import prune
from headwise.surgery.pricing._time import time_passes
from headwise.tables import Head

# Smaller models that keep these shares of the heads of every layer are timed beside the model.
_SHARES = (0.75, 0.5, 0.25)


def measure_seconds(
    model: nn.Module, attentions: Sequence[Attention], batch: Any
) -> dict[tuple[str, int], Float64[np.ndarray, " _"]]:
    """Measure the seconds of each layer's attention block with 0, 1, 2, ... heads.

    A block without heads gets the time of the smallest block that was measured.
    """
    numbers = [[_heads_kept(a, share) for a in attentions] for share in (1.0, *_SHARES)]
    models = [model, *(_pruned(model, attentions, kept) for kept in numbers[1:])]
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


def _pruned(model: nn.Module, attentions: Sequence[Attention], kept: Sequence[int]) -> nn.Module:
    removed = [
        Head(a.site.stack, a.site.layer, head)
        for a, number in zip(attentions, kept, strict=True)
        for head in range(number, a.site.n_heads)
    ]
    return prune(model, removed)
