"""A cache for a model while a block runs: entered, checked and taken away again."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from headwise.errors import UnsupportedError
from headwise.models._hooks import Hooks
from headwise.models._interface import CACHES, wrapped_interface
from headwise.models._libraries import cache_argument, cache_in
from headwise.models.cache._texts import TextBatch
from headwise.models.cache.huggingface._attention import attend_cached
from headwise.models.cache.huggingface._head_cache import HeadCache
from headwise.models.cache.huggingface._layer import Windows


@contextmanager
def open_cache(model: nn.Module, windows: Mapping[int, Windows], sinks: int) -> Iterator[HeadCache]:
    """A cache for one batch of texts of a model, usable while the block runs.

    Args:
        windows: For each layer the window of each kv head, None for all tokens; heads of layers
            that are not named keep all tokens.
    Raises:
        UnsupportedError: the model has no cache of keys and values alone, or does not read it
            through the attention interface of transformers.
    """
    sliding = sliding_windows(model)
    texts = TextBatch([id(module) for module in model.modules()])
    cache = HeadCache(texts, windows, sinks, sliding)
    with Hooks() as hooks:
        hooks.enter_context(wrapped_interface(attend_cached, CACHES))
        hooks.callback(setattr, texts, "is_open", False)
        # The base model may be called without the head around it.
        for module in {id(m): m for m in (model, getattr(model, "base_model", model))}.values():
            _follow(hooks, module, cache)
        with _checked_texts(model, cache):
            yield cache


def sliding_windows(model: nn.Module) -> list[int | None]:
    """The tokens that each layer of a model sees by itself; None for all.

    Raises:
        UnsupportedError: the model has no cache of keys and values alone.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"CachePlan: {name} is not a model of transformers. Give one, or a "
            f"headwise.PerHeadKVCache to a layer of your own."
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"CachePlan: {name} is an encoder-decoder, whose cross-attention has a cache of its "
            f"own. Give a decoder."
        )
    if cache_argument(model) is None:
        raise UnsupportedError(f"CachePlan: {name} reads no cache. Give a decoder, not an encoder.")
    layers = DynamicCache(config=model.config).layers
    for layer, kind in enumerate(map(type, layers)):
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedError(
                f"CachePlan: layer {layer} of {name} has a {kind.__name__}, which holds more than "
                f"keys and values of a text. Give a model whose layers all attend."
            )
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _follow(hooks: Hooks, module: nn.Module, cache: HeadCache) -> None:
    """Note what each forward pass of a module with this cache reads, and check what it kept."""
    signature = inspect.signature(module.forward)

    def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        try:
            return signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # the model says what is wrong
            return {}

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = inputs_of(args, kwargs)
        if cache_in(inputs) is cache:
            cache.texts.begin({**inputs.get("kwargs", {}), **inputs}, cache.get_seq_length())

    def end(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if cache_in(inputs_of(args, kwargs)) is cache:
            _check_layers(module, cache)

    hooks.before(module, begin, with_kwargs=True)
    hooks.after(module, end, with_kwargs=True)


def _check_layers(module: nn.Module, cache: HeadCache) -> None:
    """Refuse a model that did not put the keys of its layers into the cache."""
    lengths = {layer: cache.get_seq_length(layer) for layer in range(len(cache))}
    for layer, length in lengths.items():
        if length != cache.texts.n_columns:
            raise UnsupportedError(
                f"CachePlan.cache: layer {layer} of {type(module).__name__} has cached {length} of "
                f"{cache.texts.n_columns} tokens. Give a decoder whose layers all cache their "
                f"keys."
            )


@contextmanager
def _checked_texts(model: nn.Module, cache: HeadCache) -> Iterator[None]:
    """Check in `generate` that a prompt continues the text of the cache."""
    name = "prepare_inputs_for_generation"
    prepare: Callable[..., Any] | None = getattr(model, name, None)
    if prepare is None:
        yield
        return
    before = model.__dict__.get(name)

    @wraps(prepare)
    def checked(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if cache_in(kwargs) is cache:
            mask = kwargs.get("attention_mask")
            cache.texts.check_text(input_ids, mask, cache.get_seq_length())
        return prepare(input_ids, *args, **kwargs)

    model.__dict__[name] = checked
    try:
        yield
    finally:
        if before is None:
            del model.__dict__[name]
        else:
            model.__dict__[name] = before
