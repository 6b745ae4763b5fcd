"""Caches of a model whose kv heads keep different tokens, and which layers it has."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise._display import first_line
from headwise._evaluation import in_evaluation
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedError
from headwise.models import cache_argument, check_model
from headwise.ownership import call_model, example_input


@dataclass(frozen=True)
class CacheLayer:
    """A layer that caches keys and values.

    Attributes:
        layer: Its number among the layers that attend, as in the names of heads.
        n_kv_heads: The number of kv heads.
        token_bytes: The bytes of one token in one kv head, its key and its value.
        sliding_window: The tokens that the model itself lets the layer see; None for all.
    """

    layer: int
    n_kv_heads: int
    token_bytes: int
    sliding_window: int | None = None


def head_cache(
    model: nn.Module, windows: Mapping[int, Sequence[int | None]], sinks: int
) -> AbstractContextManager[Any]:
    """A cache for one batch of texts of a Hugging Face model, usable while the block runs.

    Args:
        windows: For each layer that attends how many of the last tokens each kv head keeps, a
            query's own included; None for all tokens. Without any layer all heads keep all.
        sinks: How many of the first tokens of each text heads with a window keep besides.
    Raises:
        ArgumentError: other layers are named than the model has.
        UnsupportedError: the model has no cache of keys and values alone.
    """
    model = check_model("CachePlan.cache", model)
    name, transformers = type(model).__name__, sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        raise UnsupportedError(f"CachePlan: {name} is not a model of transformers. Give one.")
    # Not above, since models of other libraries should not import transformers.
    from headwise.cache.huggingface import attends, open_cache, own_layers

    layers = own_layers(model)
    n_layers = sum(map(attends, layers))
    if windows and len(windows) != n_layers:
        raise ArgumentError(
            f"CachePlan.cache: the plan has {len(windows)} layers, {name} has {n_layers} that "
            f"attend. Use a plan for this model."
        )
    return open_cache(model, windows, sinks, layers)


def find_cache_layers(model: nn.Module) -> list[CacheLayer]:
    """The layers of a model that cache keys and values, from one short run of it.

    Raises:
        UnsupportedError: the model has no cache of keys and values alone, or reads it outside of
            the attention interface of transformers.
    """
    with head_cache(model, {}, 0) as cache, torch.no_grad(), in_evaluation(model):
        batch = example_input(model)
        name = str(cache_argument(model))  # open_cache refuses a model without one
        try:
            call_model(model, {**batch, name: cache, "use_cache": True})
        except ValueError as error:  # what transformers raises; ours say what to do
            if isinstance(error, HeadwiseError):
                raise
            raise UnsupportedError(
                f"CachePlan: {type(model).__name__} takes no other cache than its own "
                f"({first_line(error, 120)}). Use that of transformers."
            ) from error
        # A layer that runs again, as in Dory, has another cache under the same index.
        layers = {layer.index: layer for layer in cache.attending}
        return [
            CacheLayer(index, len(layer.windows), layer.token_bytes, layer.sliding_window)
            for index, layer in layers.items()
        ]
