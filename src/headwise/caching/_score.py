"""Score the kv heads of a model on texts, and measure the loss of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise._evaluation import differentiable_evaluation, in_evaluation
from headwise._progress import Progress
from headwise.caching._gated_model import StreamedModel, real_tokens
from headwise.caching._methods import METHODS
from headwise.caching._plan import CachePlan
from headwise.caching._scores import CacheScores
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import CacheLayer, find_attentions, find_cache_layers, tokenizer_of
from headwise.scoring import BatchesLike, Inputs, Loss, find_loss, read_batches


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

    def score(
        self, method: str, sinks: int, window: int, on_progress: Progress | None = None
    ) -> CacheScores:
        """What each kv head loses when it keeps these tokens alone.

        Raises:
            ArgumentError: there is no such method, or no text is longer than what is kept.
            UnsupportedError: the heads of the model cannot be gated exactly.
        """
        if method not in METHODS:
            raise ArgumentError(
                f"cache_plan: method={method!r} is none of {', '.join(METHODS)}. Give one of them."
            )
        if self.longest <= sinks + window:
            raise ArgumentError(
                f"cache_plan: sinks={sinks} and window={window} keep all {self.longest} tokens of "
                f"the longest text. Give longer texts, or a smaller window."
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
            values = METHODS[method](streamed, report).double().cpu().numpy()
        return CacheScores(tuple(streamed.heads), values, method, window, self.loss.name)

    @torch.no_grad()
    def loss_of(self, plan: CachePlan) -> float:
        """The mean loss of the texts when the model reads them with the cache of a plan."""
        losses = []
        with in_evaluation(self.model), plan.cache(self.model) as cache:
            for batch in self.batches:
                for row, real in enumerate(real_tokens(batch)):
                    cache.reset()
                    one = _one_text(batch, row, real)
                    output = self.model(**one, past_key_values=cache, use_cache=True)
                    losses.append(self.loss.per_text(output, one)[0])
        return float(torch.stack(losses).double().mean())


def _one_text(batch: Inputs, row: int, real: torch.Tensor) -> Inputs:
    """A text of a batch without its padding."""
    return {
        name: x[row : row + 1, real] if name in ("input_ids", "labels") else x
        for name, x in batch.items()
        if name in ("input_ids", "labels") or not isinstance(x, torch.Tensor)
    }
