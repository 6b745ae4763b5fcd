"""Scores of kv heads: what each loses when it streams, text by text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn

from headwise._evaluation import differentiable_evaluation, in_evaluation
from headwise._progress import Progress
from headwise.caching._plan import CachePlan, full_plan
from headwise.errors import ArgumentError
from headwise.models import cache_argument
from headwise.models.texts import tokenizer_of
from headwise.scoring import BatchesLike, Inputs, Loss, find_loss, rank_correlation, read_batches

# By layer and kv head: what each text loses where the head keeps only its first and latest tokens.
CacheScores = Mapping[tuple[int, int], Float64[np.ndarray, " M"]]


def agreement(scores: CacheScores) -> float:
    """Spearman's correlation of the scores on every other text with those on the rest."""
    losses = np.stack([*scores.values()])
    if losses.shape[1] < 2:
        return float("nan")
    return rank_correlation(losses[:, ::2].mean(1), losses[:, 1::2].mean(1))


@dataclass(frozen=True)
class ScoringTexts:
    """The texts on which kv heads are scored, and the loss that is measured on them.

    Attributes:
        full: The plan of the model's full cache, which knows its kv heads.
    """

    model: nn.Module
    full: CachePlan
    batches: Sequence[Inputs]
    loss: Loss

    @classmethod
    def read(
        cls, model: nn.Module, texts: BatchesLike, tokenizer: Any, max_tokens: int | None
    ) -> "ScoringTexts":
        """The texts in every form that `importance` takes."""
        full = full_plan(model)
        batches = read_batches(texts, model, tokenizer_of(model, tokenizer), max_tokens)
        for batch in batches:
            if "input_ids" not in batch:
                raise ArgumentError(
                    f"cache_plan: a batch of {', '.join(batch)}. Give texts, or batches with "
                    f"input_ids."
                )
        resolved = find_loss(None, model, batches[0])
        if resolved.compares:
            raise ArgumentError(
                f"cache_plan: the loss {resolved.name!r} compares embeddings. Give a model that "
                f"predicts tokens."
            )
        return cls(model, full, batches, resolved)

    @property
    def longest(self) -> int:
        """The tokens of the longest text."""
        return max(int(_real_tokens(batch).sum(1).max()) for batch in self.batches)

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
        slopes = []
        counts = [len(layer.windows) for layer in self.full.layers]
        with differentiable_evaluation(self.model, weights=False):
            for done, inputs in enumerate(self.batches, 1):
                ids = inputs["input_ids"]
                # Gates of each text, so that one backward pass scores all texts of a batch. At 1/2
                # their slopes account for joint effects, and order heads as well as leaving each
                # of them out, which takes a pass for each head.
                gates = torch.full((len(ids), sum(counts)), 0.5, dtype=torch.float64)
                gates = gates.to(ids.device).requires_grad_()
                kept = (sinks, window)
                losses = streamed_losses(self.model, counts, self.loss, inputs, gates, kept)
                slopes.append(-torch.autograd.grad(losses.sum(), gates)[0])
                if on_progress is not None:
                    on_progress(done, len(self.batches))
        heads = [(layer, head) for layer, n in enumerate(counts) for head in range(n)]
        return dict(zip(heads, torch.cat(slopes).T.double().cpu().numpy(), strict=True))

    @torch.no_grad()
    def loss_of(self, plan: CachePlan) -> float:
        """The mean loss of the texts when the model reads them with the cache of a plan."""
        losses = []
        name = str(cache_argument(self.model))
        with in_evaluation(self.model), plan.cache(self.model) as cache:
            for batch in self.batches:
                for row, real in enumerate(_real_tokens(batch)):
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


def streamed_losses(
    model: nn.Module,
    n_kv_heads: Sequence[int],
    loss: Loss,
    inputs: Inputs,
    gates: Float[Tensor, "*B N"],
    kept: tuple[int, int],
) -> Float[Tensor, " B"]:
    """The loss of each text of a batch in a model that mixes reading and streaming.

    Args:
        n_kv_heads: The number of kv heads of each layer that caches keys and values.
        gates: A gate for each kv head, optionally per text: 1 reads all tokens, 0 streams.
        kept: How many of the first tokens a streaming head reads, and how many of the latest.
    """
    from headwise.cache.huggingface import streaming

    by_layer = torch.split(gates, list(n_kv_heads), -1)
    with streaming(model, by_layer, kept, _first_columns(inputs)):
        output = model(**inputs)
    return loss.per_text(output, inputs)


def _real_tokens(inputs: Inputs) -> Bool[Tensor, "B T"]:
    """Which tokens of a batch are not padding."""
    mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def _first_columns(inputs: Inputs) -> Int[Tensor, " B"] | None:
    """The column of the first token of each text; None if all are the first."""
    first = (_real_tokens(inputs).cumsum(1) == 0).sum(1)
    return first if bool(first.any()) else None
