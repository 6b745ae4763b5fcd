"""Fetching a model from the hub of Hugging Face: small files are checked before weights come."""

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
    read_object,
)


def fetch(name: str) -> Path | None:
    """The folder of the cache that a hub name's weights are in, which are fetched first.

    Returns:
        None where the hub has them in no safetensors file of the main revision; transformers then
        looks for a conversion to one.
    Raises:
        InputError: there are adapters, kernels of the hub, or weights not in safetensors.
        OSError: there is no such name, or it is out of reach.
    """
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    adapter = fetched(name, ADAPTER)
    if adapter is not None:
        check_no_adapter(adapter.parent)
    config = Path(cached_file(name, CONFIG))
    content = read_object(config)
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
    """A file of a hub name in the cache; None where the hub has none or is out of reach."""
    from transformers.utils.hub import cached_file

    quiet: dict[str, Any] = {
        f"_raise_exceptions_for_{what}": False
        for what in ("missing_entries", "connection_errors", "gated_repo")
    }
    path = cached_file(name, file, **quiet)
    return None if path is None else Path(path)
