"""The attention weights of one head as a map of queries and keys."""

from typing import Any

import numpy as np
from jaxtyping import Float

from headwise._display import printable
from headwise.tables.plots._axes import plot_axes


def plot_weights(function: str, weights: Float[np.ndarray, "T S"], title: str, ax: Any) -> Any:
    """Draw attention weights, 0 to 1: a row per query, a column per key."""
    ax = plot_axes(function, ax, 4.6, 4.0)
    drawn = ax.imshow(weights, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    ax.set_title(printable(title), parse_math=False, fontsize="medium")
    ax.figure.colorbar(drawn, ax=ax).set_label("weight")
    return ax
