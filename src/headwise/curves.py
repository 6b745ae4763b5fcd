"""What a model loses as its heads go, by one order of them or another."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from headwise.errors import ArgumentError, ShapeError
from headwise.scores import bootstrap_means

__all__ = ["Curves"]


@dataclass(frozen=True, eq=False)
class Curves:
    """The loss of each text after so many heads are gone, for several orders of going.

    Attributes:
        removed: How many heads are gone at each point, from none on.
        n_heads: How many heads the model has.
        per_text: By the name of an order the loss of each text at each point; of a name with
            several orders, as the random one, each order's.
        loss: What was lost.
    Raises:
        ShapeError: the points do not begin at 0 and rise, or a curve has others.

    Example:
        >>> values = np.array([[[0.0, 0.0], [0.5, 1.5]]])
        >>> curves = Curves(np.array([0, 3]), 12, {"half-gate": values}, "embedding")
        >>> curves.frame()[["order", "removed", "share", "loss"]]
               order  removed  share  loss
        0  half-gate        0   0.00   0.0
        1  half-gate        3   0.25   1.0
    """

    removed: Int64[np.ndarray, " K"]
    n_heads: int
    per_text: Mapping[str, Float64[np.ndarray, "orders K M"]]
    loss: str = ""

    def __post_init__(self) -> None:
        points = {values.shape[1] for values in self.per_text.values()}
        rising = len(self.removed) and self.removed[0] == 0 and (np.diff(self.removed) > 0).all()
        if not rising or points != {len(self.removed)}:
            raise ShapeError(
                f"Curves: points at {self.removed.tolist()} heads and curves of {sorted(points)}. "
                f"Begin with 0 heads, rise, and give each curve a value at each point."
            )

    def mean(self, order: str) -> Float64[np.ndarray, "orders K"]:
        """The mean over texts at each point, of each order of that name."""
        return self._of(order).mean(-1)

    def interval(
        self, order: str, level: float = 0.95
    ) -> tuple[Float64[np.ndarray, " K"], Float64[np.ndarray, " K"]]:
        """The ends of the interval of the mean, texts drawn with replacement; of several orders,
        the least and the largest mean of any."""
        values = self._of(order)
        if len(values) > 1:
            means = values.mean(-1)
            return means.min(0), means.max(0)
        drawn = bootstrap_means(values[0].T)
        low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return low, high

    def removable(self, order: str, allowed: float) -> int:
        """How many heads go before the mean loss has grown by `allowed`; the points decide.

        Of several orders, the median number.
        """
        means = self.mean(order)
        within = np.cumprod(means - means[:, :1] < allowed, axis=1).sum(1) - 1
        return int(np.median(self.removed[within]))

    def frame(self) -> pd.DataFrame:
        """A row per order and point: the mean loss, its interval, the 95th percentile of texts.

        The interval of several orders is their range.
        """
        parts = []
        for order, values in self.per_text.items():
            low, high = self.interval(order)
            columns = {
                "order": order,
                "removed": self.removed,
                "share": self.removed / self.n_heads,
                "loss": values.mean((0, 2)),
                "low": low,
                "high": high,
                "p95": np.quantile(values, 0.95, axis=2).mean(0),
            }
            parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def _of(self, order: str) -> Float64[np.ndarray, "orders K M"]:
        if order not in self.per_text:
            raise ArgumentError(
                f"Curves: there is no order {order!r}. There are {', '.join(self.per_text)}."
            )
        return self.per_text[order]
