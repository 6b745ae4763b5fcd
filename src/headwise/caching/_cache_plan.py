"""`cache_plan`: decide by evidence which tokens each kv head of a model keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise._progress import Progress, shows_progress
from headwise.caching._layer_plan import LayerCachePlan
from headwise.caching._plan import CachePlan
from headwise.caching._scores import CacheScores, KVHead, ScoringTexts
from headwise.errors import ArgumentError
from headwise.models import CacheLayer, check_model, find_cache_layers, fingerprint
from headwise.scoring import BatchesLike, rank_correlation
from headwise.shapes import is_size


@shows_progress("Scoring kv heads")
@torch.inference_mode(False)
def cache_scores(
    model: nn.Module,
    texts: BatchesLike,
    *,
    tokenizer: Any = None,
    sinks: int = 4,
    window: int = 256,
    objective: Any = None,
    max_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> CacheScores:
    """Score how much the loss grows when a kv head keeps only its first and latest tokens.

    A gate mixes two outputs of the query heads that read a kv head: 1 reads all tokens, 0 only
    the first `sinks` of the text and the last `window`. The score is −∂loss/∂gate with all gates
    at ½ (half-gate), from one backward pass for all heads.

    Args:
        texts: Texts or batches, in every form that `importance` takes.
        objective: The loss, as `loss` of `importance`; labels may leave tokens out.
        max_tokens: The most tokens in one text. None is the model's limit.
    Returns:
        A loss for each kv head and text, in units of the loss.
    Raises:
        ArgumentError: no text is longer than what is kept.
        UnsupportedError: the model has no cache of keys and values alone, or its heads cannot be
            gated exactly.
    """
    _check_sizes(sinks, window)
    model = check_model("cache_scores", model)
    reading = ScoringTexts.read(model, texts, tokenizer, max_tokens, objective)
    return reading.score(sinks, window, on_progress)


@shows_progress("Planning the cache")
@torch.inference_mode(False)
def cache_plan(
    model: nn.Module,
    texts: BatchesLike | None = None,
    *,
    tokenizer: Any = None,
    full: Mapping[int, Sequence[int]] | None = None,
    keep: float | None = None,
    bytes: int | None = None,
    loss: float | None = None,
    sinks: int = 4,
    window: int = 256,
    n_tokens: int | None = None,
    objective: Any = None,
    per_layer: bool = False,
    domains: Mapping[str, BatchesLike] | None = None,
    max_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> CachePlan:
    """Decide which kv heads keep all tokens; the others keep the first and the latest.

    Heads are scored by `cache_scores`; the model is not changed. The plan records the measured
    loss of the texts with the full cache and with its own, and how well the scores agree between
    halves of the texts and with those of other domains.

    Args:
        texts: Long texts on which heads are scored, in every form that `importance` takes;
            `retrieval_batches` makes some for any model. None with `full`.
        full: The kv heads that keep all tokens, for a plan of your own: `{layer: [kv heads]}`.
        keep: The largest share of kv heads that keep all tokens.
        bytes: The most bytes of the cache of one text of `n_tokens`.
        loss: The largest increase of the mean loss; found by measuring plans.
        window: How many of the last tokens the others keep, a query's own included.
        n_tokens: The length of a text for which bytes are counted. None is the longest text.
        per_layer: Whether all layers keep the same share.
        domains: Other texts by name, to report how far their scores agree.
    Returns:
        A plan, which needs no model to be saved; `plan.cache(model)` uses it.
    Raises:
        ArgumentError: not exactly one of `full`, `keep`, `bytes` and `loss` is given, a value is
            out of range, or no text is longer than what is kept.
        HeadError: a head of `full` does not exist.
        UnsupportedError: the model has no cache of keys and values alone, or its heads cannot be
            gated exactly.
    Source:
        Heads that retrieve and heads that stream: Xiao et al. 2024, DuoAttention
        (arXiv:2410.10819).
    """
    goals = {"full": full, "keep": keep, "bytes": bytes, "loss": loss}
    goal = _check_goals(goals)
    _check_sizes(sinks, window)
    model = check_model("cache_plan", model)
    if full is not None:
        return _of_heads(model, full, sinks, window)
    if texts is None:
        raise ArgumentError(f"cache_plan: {goal}={goals[goal]} without texts. Give texts.")
    reading = ScoringTexts.read(model, texts, tokenizer, max_tokens, objective)
    scores = reading.score(sinks, window, on_progress)
    planner = _Planner(reading, scores, sinks, per_layer, n_tokens or reading.longest)
    plan = planner.by(goal, goals[goal])
    others = {
        name: ScoringTexts.read(model, other, tokenizer, max_tokens, objective).score(sinks, window)
        for name, other in (domains or {}).items()
    }
    return replace(plan, measured={**plan.measured, **_agreement(scores, others)})


class _Planner:
    """Makes plans from scores, and measures what they lose."""

    def __init__(
        self,
        reading: ScoringTexts,
        scores: CacheScores,
        sinks: int,
        per_layer: bool,
        n_tokens: int,
    ) -> None:
        self._reading, self._scores, self._sinks = reading, scores, sinks
        self._losses, self._n_tokens = scores.by_head(), n_tokens
        self._order = _in_order(self._losses, per_layer)

    def by(self, goal: str, value: Any) -> CachePlan:
        """The plan for one of the goals."""
        base = self._reading.loss_of(self._plan(len(self._order)))
        n_full = self._fewest(base + value) if goal == "loss" else self._number(goal, value)
        plan = self._plan(n_full)
        lost = self._reading.loss_of(plan)
        why = f"{goal}={value:g} by half-gate of the loss {self._reading.loss.name}"
        measured = {"loss of the full cache": base, "loss of this cache": lost}
        return replace(plan, why=why, measured=measured)

    def _number(self, goal: str, value: Any) -> int:
        """How many kv heads keep all tokens."""
        n_heads = len(self._order)
        if goal == "keep":
            return int(np.floor(value * n_heads + 1e-9))
        fitting = [n for n in range(n_heads + 1) if self._plan(n).nbytes(self._n_tokens) <= value]
        if not fitting:
            least = self._plan(0).nbytes(self._n_tokens)
            raise ArgumentError(
                f"cache_plan: bytes={value}, but the windows alone take {least} bytes for a "
                f"text of {self._n_tokens} tokens. Give more bytes, or a smaller window."
            )
        return max(fitting)

    def _fewest(self, most: float) -> int:
        """The fewest heads with all tokens for which the plan's measured loss is at most `most`."""
        low, high = 0, len(self._order)
        while low < high:
            middle = (low + high) // 2
            if self._reading.loss_of(self._plan(middle)) <= most:
                high = middle
            else:
                low = middle + 1
        return high

    def _plan(self, n_full: int) -> CachePlan:
        window = self._scores.window
        choice = {head: None if i < n_full else window for i, head in enumerate(self._order)}
        losses, layers = self._losses, []
        for layer in self._reading.layers:
            heads = [(layer.layer, head) for head in range(layer.n_kv_heads)]
            windows = tuple(choice[head] for head in heads)
            layers.append(
                LayerCachePlan(layer.layer, windows, tuple(losses[head] for head in heads))
            )
        plan = CachePlan(tuple(layers), self._sinks)
        return _for_model(plan, self._reading.model, self._reading.layers)


def _in_order(losses: Mapping[KVHead, float], per_layer: bool) -> list[KVHead]:
    """The kv heads from the one that loses most when it streams to the one that loses least.

    Args:
        per_layer: Whether the first ones of all layers come before all second ones.
    """
    ordered = sorted(losses, key=lambda head: -losses[head])
    if not per_layer:
        return ordered
    within = {head: [x for x in ordered if x[0] == head[0]].index(head) for head in ordered}
    return sorted(ordered, key=lambda head: within[head])


def _for_model(plan: CachePlan, model: nn.Module, layers: Sequence[CacheLayer]) -> CachePlan:
    """The plan with the sizes of the model's layers, for no other weights."""
    sized = (
        replace(planned, token_bytes=layer.token_bytes, sliding_window=layer.sliding_window)
        for planned, layer in zip(plan.layers, layers, strict=True)
    )
    return replace(plan, layers=tuple(sized), model=fingerprint(model))


def _of_heads(
    model: nn.Module, full: Mapping[int, Sequence[int]], sinks: int, window: int
) -> CachePlan:
    layers = find_cache_layers(model)
    counts = [layer.n_kv_heads for layer in layers]
    plan = CachePlan.of(full, n_layers=len(layers), n_kv_heads=counts, sinks=sinks, window=window)
    return replace(_for_model(plan, model, layers), why="kv heads by name")


def _agreement(scores: CacheScores, others: Mapping[str, CacheScores]) -> dict[str, float]:
    measured = {"agreement between halves of the texts": scores.stability()}
    for name, other in others.items():
        measured[f"agreement with {name}"] = rank_correlation(scores.mean, other.mean)
    return {name: value for name, value in measured.items() if np.isfinite(value)}


def _check_goals(goals: Mapping[str, Any]) -> str:
    named = [name for name, value in goals.items() if value is not None]
    if len(named) != 1:
        values = ", ".join(f"{name}={value!r}" for name, value in goals.items())
        raise ArgumentError(f"cache_plan: {values}. Give exactly one of them.")
    goal, value = named[0], goals[named[0]]
    if goal != "full" and not isinstance(value, int | float | np.number):
        raise ArgumentError(f"cache_plan: {goal}={value!r}. Give a number.")
    if goal == "keep" and not 0 <= value <= 1:
        raise ArgumentError(f"cache_plan: keep={value!r}. Give a share from 0 to 1.")
    if goal in ("bytes", "loss") and not 0 <= value < float("inf"):
        raise ArgumentError(f"cache_plan: {goal}={value!r}. Give a number from 0 on.")
    return goal


def _check_sizes(sinks: Any, window: Any) -> None:
    if not is_size(window):
        raise ArgumentError(f"cache_plan: window={window!r}. Give a number of tokens from 1 on.")
    if not (is_size(sinks) or sinks == 0):
        raise ArgumentError(f"cache_plan: sinks={sinks!r}. Give a number of tokens from 0 on.")
