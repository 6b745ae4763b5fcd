"""The plan of a cache for a model, on the texts of a file or made-up ones."""

from pathlib import Path
from typing import Any

from headwise.caching import CachePlan, cache_plan, retrieval_batches
from headwise.cli._options import Shared
from headwise.cli._print import progress_bar
from headwise.cli.tasks._models import open_model
from headwise.cli.tasks._texts import note_split_texts, read_drawn_texts
from headwise.models.texts import context_of

# The share of kv heads that keep all tokens, where no goal is set.
_KEEP = 0.5
_TEXTS, _TOKENS = 16, 1024  # of retrieval, where no file is given


def plan_cache(name: str, path: Path | None, shared: Shared, **settings: Any) -> CachePlan:
    """Plan the cache of a model.

    Args:
        settings: Further arguments of `cache_plan`.
    """
    read = [] if path is None else read_drawn_texts(path, shared)
    model, tokenizer = open_model(name, shared)
    texts: Any = read
    if path is None:
        n_texts = shared.max_texts or _TEXTS
        n_tokens = shared.max_tokens or min(_TOKENS, context_of(model, tokenizer))
        texts = retrieval_batches(model, n_texts, n_tokens, seed=shared.seed or 0)
    else:
        note_split_texts(read, model, tokenizer, shared)
    if all(settings[goal] is None for goal in ("keep", "bytes", "loss")):
        settings["keep"] = _KEEP
    with progress_bar(f"Scoring the kv heads of {name}") as on_progress:
        return cache_plan(
            model,
            texts,
            tokenizer=tokenizer,
            max_tokens=shared.max_tokens,
            on_progress=on_progress,
            **settings,
        )
