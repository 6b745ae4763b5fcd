"""`cache_plan`: decide by evidence which tokens each kv head keeps; and texts that tell."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise._progress import Progress, shows_progress
from headwise.caching._plan import CachePlan, full_plan, sized
from headwise.caching._scores import ScoringTexts, agreement
from headwise.errors import ArgumentError
from headwise.models import check_model, device_of, fingerprint
from headwise.models.texts import IGNORED
from headwise.scoring import BatchesLike
from headwise.shapes import is_size

_SPAN = 8  # tokens that occur twice


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
    max_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> CachePlan:
    """Decide which kv heads keep all tokens; the others keep the first and the latest.

    A gate mixes two outputs of the query heads that read a kv head: 1 reads all tokens, 0 only
    the first `sinks` of the text and the last `window`. The score of a head is −∂loss/∂gate with
    all gates at ½ (half-gate), from one backward pass for all heads; the model is not changed. The
    plan records the measured loss of the texts with the full cache and with its own, and how well
    the scores agree between halves of the texts.

    Args:
        texts: Long texts on which heads are scored, in every form that `importance` takes;
            `retrieval_batches` makes some for any model. None with `full`.
        full: The kv heads that keep all tokens, for a plan of your own: `{layer: [kv heads]}`.
        keep: The largest share of kv heads that keep all tokens.
        bytes: The most bytes of the cache of one text of `n_tokens`.
        loss: The largest increase of the mean loss; found by measuring plans.
        window: How many of the last tokens the others keep, a query's own included.
        n_tokens: The length of a text for which bytes are counted. None is the longest text.
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
    reading = ScoringTexts.read(model, texts, tokenizer, max_tokens)
    scores = reading.score(sinks, window, on_progress)
    losses, weights = {head: float(x.mean()) for head, x in scores.items()}, fingerprint(model)
    # From the one that loses most when it streams to the one that loses least.
    order = sorted(losses, key=lambda head: -losses[head])

    def planned(n_full: int) -> CachePlan:
        """The plan in which so many kv heads keep all tokens."""
        full, layers = set(order[:n_full]), []
        for layer in reading.full.layers:
            heads = [(layer.layer, head) for head in range(len(layer.windows))]
            windows = tuple(None if head in full else window for head in heads)
            lost = tuple(losses[head] for head in heads)
            layers.append(replace(layer, windows=windows, losses=lost))
        return CachePlan(tuple(layers), sinks, weights)

    value: Any = goals[goal]
    base = reading.loss_of(planned(len(order)))
    if goal == "keep":
        n_full = int(np.floor(value * len(order) + 1e-9))
    elif goal == "bytes":
        n_full = _most_that_fit(planned, len(order), value, n_tokens or reading.longest)
    else:  # the fewest heads with all tokens whose measured loss is low enough, by bisection
        numbers = range(len(order))
        n_full = bisect_left(
            numbers, True, key=lambda n: reading.loss_of(planned(n)) <= base + value
        )
    plan = planned(n_full)
    lost = reading.loss_of(plan)
    measured = {"loss of the full cache": base, "loss of this cache": lost}
    measured["agreement between halves of the texts"] = agreement(scores)
    # The agreement between halves of one text is NaN, and is left out.
    known = {name: x for name, x in measured.items() if "agreement" not in name or np.isfinite(x)}
    why = f"{goal}={value:g} by half-gate of the loss {reading.loss.name}"
    return replace(plan, why=why, measured=known)


def _most_that_fit(
    planned: Callable[[int], CachePlan], n_heads: int, most: int | float, n_tokens: int
) -> int:
    """The most kv heads with all tokens whose cache of a text fits into so many bytes."""
    fitting = [n for n in range(n_heads + 1) if planned(n).nbytes(n_tokens) <= most]
    if not fitting:
        raise ArgumentError(
            f"cache_plan: bytes={most}, but the windows alone take {planned(0).nbytes(n_tokens)} "
            f"bytes for a text of {n_tokens} tokens. Give more bytes, or a smaller window."
        )
    return max(fitting)


def _of_heads(
    model: nn.Module, full: Mapping[int, Sequence[int]], sinks: int, window: int
) -> CachePlan:
    whole = full_plan(model)
    counts = [len(layer.windows) for layer in whole.layers]
    plan = CachePlan.of(full, n_layers=len(counts), n_kv_heads=counts, sinks=sinks, window=window)
    return replace(sized(plan, whole), model=fingerprint(model), why="kv heads by name")


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


def retrieval_batches(
    model: nn.Module, n: int = 16, n_tokens: int = 1024, *, seed: int = 0
) -> list[dict[str, Any]]:
    """Texts of random tokens in which a span of eight occurs twice, far from each other.

    The second occurrence ends the text; its tokens from the third on are the labels. A model
    predicts them by copying from its context, whatever language it knows, so the loss grows when
    a head that copies streams. If the model is used for more than that, give `cache_plan` long
    texts of your own.

    Args:
        n: The number of texts, a batch each.
        n_tokens: The length of each text.
    Returns:
        Batches of one text: `input_ids`, and `labels` that leave out all but the second span.
    Raises:
        ArgumentError: there is no text or vocabulary, or texts have fewer than 32 tokens.
    """
    config: Any = getattr(check_model("retrieval_batches", model), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    n_words = getattr(config, "vocab_size", 0)
    if not is_size(n) or not is_size(n_tokens) or n_tokens < 4 * _SPAN:
        raise ArgumentError(
            f"retrieval_batches: n={n}, n_tokens={n_tokens}. Give at least one text of "
            f"{4 * _SPAN} tokens or more."
        )
    if n_words <= _SPAN:
        raise ArgumentError(
            f"retrieval_batches: {type(model).__name__} has only {n_words} tokens to draw from for "
            f"a span of {_SPAN}. Give texts of your own."
        )
    rng = torch.Generator().manual_seed(seed)
    device = device_of(model)
    batches = []
    for _ in range(n):
        ids = torch.randint(0, n_words, (1, n_tokens), generator=rng)
        start = int(torch.randint(0, n_tokens // 2, (), generator=rng))
        ids[:, -_SPAN:] = ids[:, start : start + _SPAN]
        labels = torch.full_like(ids, IGNORED)
        labels[:, 2 - _SPAN :] = ids[:, 2 - _SPAN :]
        batches.append({"input_ids": ids.to(device), "labels": labels.to(device)})
    return batches
