"""Download a model from the Hugging Face hub, checking its small files before its weights."""

from pathlib import Path
from typing import Any

from headwise.models.open._folder_checks import (
    ADAPTER,
    CONFIG,
    INDEX,
    WEIGHTS,
    check_kernels,
    check_no_adapter,
    named_weights,
    names_in_index,
    read_config,
)


def fetch(name: str) -> Path | None:
    """Download a model, and return its folder in the cache.

    Returns:
        None if its main revision has no safetensors file; transformers then looks for a revision
        with converted weights.
    Raises:
        InputError: there are adapters, kernels of the hub, or weights not in safetensors.
        OSError: there is no such name, or the hub cannot be reached.
    """
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    adapter = fetched(name, ADAPTER)
    if adapter is not None:
        check_no_adapter(adapter.parent)
    config = Path(cached_file(name, CONFIG))
    content = read_config(config)
    check_kernels(content, config)
    named = named_weights(config.parent, content)
    weights = fetched(name, named or WEIGHTS)
    if weights is None and named is None:
        weights = fetched(name, INDEX)
    if weights is None:
        return None
    if weights.suffix == ".json":
        names_in_index(weights)
        get_checkpoint_shard_files(name, str(weights))
    return config.parent


def fetched(name: str, file: str) -> Path | None:
    """A file of a hub model in the cache; None if it does not exist or cannot be reached."""
    from transformers.utils.hub import cached_file

    quiet: dict[str, Any] = {
        f"_raise_exceptions_for_{problem}": False
        for problem in ("missing_entries", "connection_errors", "gated_repo")
    }
    path = cached_file(name, file, **quiet)
    return None if path is None else Path(path)
