"""Scores of heads by rank, with their intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from headwise._display import printable
from headwise.tables._heads import Head
from headwise.tables.plots._axes import plot_axes

_NAMED = 40  # more names would overlap


def plot_ranking(
    function: str,
    heads: Sequence[Head],
    values: tuple[Float64[np.ndarray, " N"], ...],
    label: str,
    ax: Any,
) -> Any:
    """Draw the value of each head with its interval, in the order of the heads.

    Up to 40 heads are named along the axis.

    Args:
        values: The value of each head, and both ends of its interval.
    """
    ax = plot_axes(function, ax, 8.0, 3.5)
    ranks = np.arange(len(heads))
    value, low, high = values
    ax.vlines(ranks, low, high, color="0.6", linewidth=1)
    ax.plot(ranks, value, "o", color="#0b6e99", markersize=3)
    ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    ax.set_ylabel(printable(label), parse_math=False)
    if len(heads) <= _NAMED:
        ax.set_xticks(ranks, [str(head) for head in heads], rotation=90, fontsize="small")
    else:
        ax.set_xlabel("heads, from the least to the most important")
    return ax
