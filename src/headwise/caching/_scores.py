"""Scores of kv heads: what each loses when it streams, with an interval over texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import nn

from headwise._evaluation import differentiable_evaluation, in_evaluation
from headwise._progress import Progress
from headwise.caching._plan import CachePlan
from headwise.caching._streamed_model import StreamedModel, real_tokens
from headwise.errors import ArgumentError, ShapeError, UnsupportedError
from headwise.models import CacheLayer, cache_argument, find_cache_layers
from headwise.models.ownership import find_attentions
from headwise.models.texts import tokenizer_of
from headwise.scoring import BatchesLike, Inputs, Loss, find_loss, rank_correlation, read_batches
from headwise.tables import bootstrap_means, tails_of

KVHead = tuple[int, int]
"""A layer and a kv head."""


@dataclass(frozen=True, eq=False)
class CacheScores:
    """The loss caused by each kv head that keeps only its first and latest tokens.

    Attributes:
        heads: The layer and the kv head of each column.
        per_text: The loss of each kv head in each text.
        window: The tokens that a streaming head keeps besides the first ones.
        loss: The name of the loss.
    Raises:
        ShapeError: the columns are not one for each head, or there is no text.
    """

    heads: tuple[KVHead, ...]
    per_text: Float64[np.ndarray, "M N"]
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
        """A row for each kv head: name, layer, kv_head, loss with its 95 % interval, window."""
        low, high = self.interval()
        return pd.DataFrame(
            {
                "name": [f"L{layer}.KV{head}" for layer, head in self.heads],
                "layer": [layer for layer, _ in self.heads],
                "kv_head": [head for _, head in self.heads],
                "loss": self.mean,
                "ci_low": low,
                "ci_high": high,
                "window": self.window,
            }
        )


@dataclass(frozen=True)
class ScoringTexts:
    """The texts on which kv heads are scored, and the loss that is measured on them.

    Attributes:
        layers: The layers of the model that cache keys and values.
    """

    model: nn.Module
    layers: list[CacheLayer]
    batches: Sequence[Inputs]
    loss: Loss

    @classmethod
    def read(
        cls, model: nn.Module, texts: BatchesLike, tokenizer: Any, max_tokens: int | None, loss: Any
    ) -> "ScoringTexts":
        """The texts in every form that `importance` takes."""
        layers = find_cache_layers(model)
        batches = read_batches(texts, model, tokenizer_of(model, tokenizer), max_tokens)
        for batch in batches:
            if "input_ids" not in batch:
                raise ArgumentError(
                    f"cache_plan: a batch of {', '.join(batch)}. Give texts, or batches with "
                    f"input_ids."
                )
        resolved = find_loss(loss, model, batches[0])
        if resolved.compares:
            raise ArgumentError(
                f"cache_plan: the loss {resolved.name!r} compares embeddings. Give a model that "
                f"predicts tokens, or another loss."
            )
        return cls(model, layers, batches, resolved)

    @property
    def longest(self) -> int:
        """The tokens of the longest text."""
        return max(int(real_tokens(batch).sum(1).max()) for batch in self.batches)

    def score(self, sinks: int, window: int, on_progress: Progress | None = None) -> CacheScores:
        """What each kv head loses when it keeps these tokens alone.

        Raises:
            ArgumentError: no text is longer than what is kept.
            UnsupportedError: the heads of the model cannot be gated exactly.
        """
        if self.longest <= sinks + window:
            most = self.longest - sinks - 1
            smaller = f", or a window up to {most}" if most > 0 else ""
            raise ArgumentError(
                f"cache_plan: sinks={sinks} and window={window} keep all {self.longest} tokens of "
                f"the longest text. Give texts of over {sinks + window} tokens{smaller}."
            )
        report = on_progress or (lambda done, total: None)
        with differentiable_evaluation(self.model, weights=False):
            attentions = find_attentions(self.model, self.batches[0])
            counts = [attention.site.n_kv_heads for attention in attentions]
            if counts != [layer.n_kv_heads for layer in self.layers]:
                raise UnsupportedError(
                    f"cache_plan: {type(self.model).__name__} attends with {counts} kv heads, but "
                    f"caches {[layer.n_kv_heads for layer in self.layers]}. Name the heads: "
                    f"full={{layer: [kv heads]}}."
                )
            streamed = StreamedModel(self.model, attentions, self.loss, self.batches, sinks, window)
            values = streamed.scores(report).double().cpu().numpy()
        return CacheScores(tuple(streamed.heads), values, window, self.loss.name)

    @torch.no_grad()
    def loss_of(self, plan: CachePlan) -> float:
        """The mean loss of the texts when the model reads them with the cache of a plan."""
        losses = []
        name = str(cache_argument(self.model))
        with in_evaluation(self.model), plan.cache(self.model) as cache:
            for batch in self.batches:
                for row, real in enumerate(real_tokens(batch)):
                    cache.reset()
                    text = _one_text(batch, row, real)
                    output = self.model(**text, **{name: cache}, use_cache=True)
                    losses.append(self.loss.per_text(output, text)[0])
        return float(torch.stack(losses).double().mean())


def _one_text(batch: Inputs, row: int, real: torch.Tensor) -> Inputs:
    """A text of a batch without its padding."""
    return {
        name: x[row : row + 1, real] if name in ("input_ids", "labels") else x
        for name, x in batch.items()
        if name in ("input_ids", "labels") or not isinstance(x, torch.Tensor)
    }
