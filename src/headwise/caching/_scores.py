"""Scores of kv heads: what each loses when it streams, with an interval over texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from jaxtyping import Float64

from headwise.errors import ShapeError
from headwise.scoring import rank_correlation
from headwise.tables import bootstrap_means, tails_of

KVHead = tuple[int, int]
"""A layer and a kv head."""


@dataclass(frozen=True, eq=False)
class CacheScores:
    """What each kv head of a model loses when it keeps its first and latest tokens alone.

    Attributes:
        heads: The layer and the kv head of each column.
        per_text: The loss of each kv head in each text.
        method: "half-gate", "gradient", "leave-one-out", "mass" or "output".
        window: The tokens that a streaming head keeps besides the first ones.
        loss: The loss that methods with a loss measure.
    Raises:
        ShapeError: the columns are not one for each head, or there is no text.
    """

    heads: tuple[KVHead, ...]
    per_text: Float64[np.ndarray, "M N"]
    method: str
    window: int
    loss: str = ""

    def __post_init__(self) -> None:
        if self.per_text.shape[1] != len(self.heads) or not len(self.per_text):
            raise ShapeError(
                f"CacheScores: {len(self.heads)} kv heads, values of {self.per_text.shape}. Give "
                f"a row for each text and a column for each kv head."
            )

    @cached_property
    def mean(self) -> Float64[np.ndarray, " N"]:
        """The mean over texts."""
        return self.per_text.mean(0)

    def by_head(self) -> Mapping[KVHead, float]:
        """The mean of each kv head."""
        return dict(zip(self.heads, self.mean.tolist(), strict=True))

    def interval(
        self, level: float = 0.95
    ) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
        """The bootstrap interval of each mean, texts resampled; NaN for a single text."""
        if len(self.per_text) == 1:
            unknown = np.full(len(self.heads), np.nan)
            return unknown, unknown
        low, high = np.quantile(bootstrap_means(self.per_text), tails_of(level), axis=0)
        return low, high

    def stability(self) -> float:
        """Spearman's correlation of the scores on every other text with those on the rest."""
        if len(self.per_text) < 2:
            return float("nan")
        return rank_correlation(self.per_text[::2].mean(0), self.per_text[1::2].mean(0))

    def frame(self) -> pd.DataFrame:
        """A row for each kv head: name, layer, kv_head, loss with its 95 % interval, method."""
        low, high = self.interval()
        return pd.DataFrame(
            {
                "name": [f"L{layer}.KV{head}" for layer, head in self.heads],
                "layer": [layer for layer, _ in self.heads],
                "kv_head": [head for _, head in self.heads],
                "loss": self.mean,
                "ci_low": low,
                "ci_high": high,
                "method": self.method,
                "window": self.window,
            }
        )
