"""The plan of a cache for a model, on the texts of a file or made-up ones."""

from pathlib import Path
from typing import TYPE_CHECKING

from headwise.caching import CachePlan, cache_plan, retrieval_batches
from headwise.cli._options import Shared
from headwise.cli._progress_bar import progress_bar
from headwise.cli.tasks._models import open_model
from headwise.cli.tasks._texts import note_split_texts, read_drawn_texts
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.cli.commands._cache import CacheGoal

# The share of kv heads that keep all tokens, where no goal is set.
_KEEP = 0.5
_TEXTS, _TOKENS = 16, 1024  # of retrieval, where no file is given


def plan_cache(name: str, path: Path | None, shared: Shared, goal: "CacheGoal") -> CachePlan:
    """Plan the cache of a model.

    Raises:
        ArgumentError: the window sizes are no numbers.
    """
    try:
        windows = [int(size) for size in goal.window.split(",")]
    except ValueError as error:
        raise ArgumentError(
            f"cache: --window {goal.window} is no number of tokens. Write 256, or 64,256."
        ) from error
    texts = None if path is None else read_drawn_texts(path, shared)
    model, tokenizer = open_model(name, shared)
    if texts is None:
        n_texts, n_tokens = shared.max_texts or _TEXTS, shared.max_tokens or _TOKENS
        texts = retrieval_batches(model, n_texts, n_tokens, seed=shared.seed or 0)
    else:
        note_split_texts(texts, model, tokenizer, shared)
    has_goal = any(x is not None for x in (goal.keep, goal.bytes, goal.loss))
    keep = goal.keep if has_goal else _KEEP
    with progress_bar(f"Scoring the kv heads of {name}") as on_progress:
        return cache_plan(
            model, texts, tokenizer=tokenizer, keep=keep, bytes=goal.bytes, loss=goal.loss,
            sinks=goal.sinks, window=windows, method=goal.method,
            max_tokens=shared.max_tokens, on_progress=on_progress,
        )  # fmt: skip
