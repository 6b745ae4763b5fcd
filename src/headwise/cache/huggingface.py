"""A Hugging Face cache whose kv heads keep different tokens, and the model that runs with it.

`open_cache` makes the cache, follows the forward passes of the model and wraps its attention
functions. Each layer stores keys in groups of heads and returns `GroupedKeys` in their place, which
`attend_cached` reads.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from headwise.attention.huggingface import Call
from headwise.cache._attend import streaming_heads
from headwise.cache._grouped_keys import CallKeys, GroupedKeys
from headwise.cache._storage import HeadGroup
from headwise.errors import ArgumentError, ShapeError, UnsupportedError
from headwise.models import Hooks, cache_argument, cache_in
from headwise.models.interface import CACHES, STREAMS, wrapped_interface

# The last tokens that each kv head keeps; None for all tokens.
Windows = Sequence[int | None]
_ATTEND = (DynamicLayer, DynamicSlidingWindowLayer)
_ATTEND_BESIDE = (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class CacheBlock:
    """The block of a model in which its caches can be used; a copied cache belongs to it too.

    Attributes:
        modules: The modules of the model, by identity.
        is_open: Whether the block runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = frozenset(id(module) for module in model.modules())
        self.is_open = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "CacheBlock":
        return self

    def cache_in(self, values: Mapping[str, Any]) -> "HeadCache | None":
        """The cache of this block among the arguments of a call, or None."""
        cache = cache_in(values)
        return cache if isinstance(cache, HeadCache) and cache.texts.block is self else None


class TextBatch:
    """What the forward passes of a model have read into a cache.

    Attributes:
        block: The block in which the cache can be used.
        first: The column of the first token of each text; None if no row is padded.
        n_columns: The number of columns after the forward pass that runs; −1 before the first.
    """

    def __init__(self, block: CacheBlock) -> None:
        self.block = block
        self.first: Int[Tensor, " B"] | None = None
        self._ids: Int[Tensor, "B n"] | None = None
        self.n_columns = -1  # the columns after the pass that runs

    def begin(self, inputs: Mapping[str, Any], n_cached: int) -> None:
        """Record what a forward pass reads after `n_cached` columns.

        Raises:
            ArgumentError: the attention mask is of another text, or has padding within texts.
        """
        ids = inputs.get("input_ids")
        tokens = ids if isinstance(ids, Tensor) else inputs.get("inputs_embeds")
        if not isinstance(tokens, Tensor):
            return
        stop = n_cached + tokens.shape[1]
        self.first = _first_columns(inputs.get("attention_mask"), stop, n_cached, self.first)
        self.n_columns = stop
        before = tokens[:, :0] if n_cached == 0 else self._ids
        self._ids = None
        if isinstance(ids, Tensor) and before is not None and len(before) == len(ids):
            self._ids = torch.cat((before[:, :n_cached], ids.detach()), 1)

    def check_call(self, stop: int) -> None:
        """Refuse keys that do not belong to the forward pass that runs.

        Args:
            stop: The number of columns with these keys.
        """
        if not self.block.is_open:
            raise ArgumentError(
                f"CachePlan.cache: {stop} tokens for a cache whose block has ended. Enter "
                f"plan.cache(model) again."
            )
        if stop != self.n_columns:
            raise ArgumentError(
                f"CachePlan.cache: keys of {stop} tokens outside of a forward pass of the model. "
                f"Call the model that plan.cache(model) was entered for."
            )

    def check_text(self, ids: Any, mask: Any, n_cached: int) -> None:
        """Refuse to continue another text than the first `n_cached` columns hold.

        Args:
            ids: The whole text, or its last tokens.
            mask: The attention mask of the whole text; None if `ids` are the whole text.
        """
        if not n_cached or self._ids is None or not isinstance(ids, Tensor):
            return
        start = mask.shape[-1] - ids.shape[1] if isinstance(mask, Tensor) else 0
        text = self._ids[:, :n_cached]
        is_continued = start + ids.shape[1] >= n_cached >= start
        if is_continued and torch.equal(ids[:, : n_cached - start], text[:, start:]):
            return
        raise ArgumentError(
            f"CachePlan.cache: the cache holds {len(text)} x {n_cached} tokens of another text "
            f"than these {len(ids)} x {ids.shape[1]}. Enter plan.cache(model) again for each text, "
            f"or call cache.reset()."
        )

    def select(self, index: Int[Tensor, " beams"]) -> None:
        """Keep some rows of the batch; a row may be repeated."""
        if self.first is not None:
            self.first = self.first[index.to(self.first.device)]
        if self._ids is not None:
            self._ids = self._ids[index.to(self._ids.device)]

    def reset(self) -> None:
        """Forget the texts."""
        self.first, self._ids, self.n_columns = None, None, -1


def _first_columns(
    mask: Any, n_columns: int, n_cached: int, before: Int[Tensor, " B"] | None
) -> Int[Tensor, " B"] | None:
    """The column of the first token of each text; None if no row is padded."""
    if mask is None and before is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        kind = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ArgumentError(
            f"CachePlan.cache: the attention mask is {kind}, from which the first tokens of each "
            f"text cannot be read. Give one of [batch, tokens]."
        )
    if mask.shape[1] != n_columns:
        raise ArgumentError(
            f"CachePlan.cache: an attention mask of {mask.shape[1]} columns, but {n_cached} tokens "
            f"in the cache and {n_columns - n_cached} new ones. Enter plan.cache(model) again for "
            f"each text."
        )
    real = mask != 0
    first = (real.cumsum(1) == 0).sum(1)
    if bool((real.sum(1) + first != n_columns).any()):
        raise ArgumentError(
            f"CachePlan.cache: padding within or after texts, which begin at columns "
            f"{first.tolist()} of {n_columns}. Pad on the left."
        )
    cached = torch.zeros_like(first) if before is None else before
    if bool(((cached != first) & (cached < n_cached)).any()):
        raise ArgumentError(
            f"CachePlan.cache: texts begin at columns {first.tolist()}, but at {cached.tolist()} "
            f"in the cache. Enter plan.cache(model) again for each text."
        )
    return first if bool(first.any()) else None


class HeadCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer: each kv head keeps all tokens, or the first and the latest.

    Attributes:
        index: Its number among the layers that attend.
        batch: The number of rows in the batch, once there was one.
        windows: The last tokens that each kv head keeps; None before the first call of a layer
            without a plan, whose heads keep all tokens.
        token_bytes: The bytes of one token in one kv head, once there was one.
        sliding_window: The tokens that the model itself lets the layer see; None for all.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        index: int,
        windows: Windows | None,
        sinks: int,
        sliding_window: int | None,
    ) -> None:
        super().__init__()
        del self.keys, self.values
        self.index, self.windows, self.sinks = index, windows, sinks
        self.sliding_window = sliding_window
        self._groups: list[HeadGroup] = []
        self.batch, self.token_bytes, self.record_past = 0, 0, False

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values"):  # as Dory does where its loops share a cache
            raise UnsupportedError(
                f"CachePlan.cache: the model reads the {name} of layer {self.index} past the "
                f"cache, where heads keep different tokens. Use the cache of transformers."
            )
        raise AttributeError(name)

    @property
    def nbytes(self) -> int:
        """The bytes of the storages of all heads."""
        tensors = [x for group in self._groups for x in group.tensors]
        return sum(x.untyped_storage().nbytes() for x in tensors)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Group the kv heads that keep the same tokens."""
        n = key_states.shape[1]
        windows = [None] * n if self.windows is None else list(self.windows)
        if len(windows) != n:
            raise ArgumentError(
                f"CachePlan.cache: layer {self.index} has {n} kv heads, the plan has "
                f"{len(windows)}. Use a plan for this model."
            )
        self.batch, self.windows = len(key_states), windows
        self.token_bytes = sum(x.shape[3] * x.element_size() for x in (key_states, value_states))
        heads_of: dict[tuple[int | None, int | None], list[int]] = {}
        for head, window in enumerate(windows):
            heads_of.setdefault(self._kept(window), []).append(head)
        self._groups = [HeadGroup(heads, *kept) for kept, heads in heads_of.items()]
        self.is_initialized = True
        if self.record_past:
            self.activate_past_recording()

    def _kept(self, window: int | None) -> tuple[int | None, int | None]:
        """The first and the last tokens that a head keeps, in a layer with a window of its own."""
        limit = self.sliding_window
        if window is None or (limit is not None and window >= limit):
            return None, limit
        return self.sinks, window

    def update(
        self,
        key_states: Float[Tensor, "B Hkv T D"],
        value_states: Float[Tensor, "B Hkv T Dv"],
        *args: Any,
        texts: TextBatch,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values; only our attention can read the tensors that are returned.

        Args:
            texts: What the cache holds. It comes with each call, since Dory copies layers.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ArgumentError(
                "CachePlan.cache: the keys require gradients, which cannot pass through memory "
                "that is written in place. Run the model under torch.no_grad()."
            )
        texts.check_call(self.get_seq_length() + key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if len(key_states) != self.batch:
            raise ShapeError(
                f"CachePlan.cache: {len(key_states)} texts, but the cache holds {self.batch}. "
                f"Keep the batch size, or enter plan.cache(model) again."
            )
        first = texts.first
        groups = [(group, group.append(key_states, value_states, first)) for group in self._groups]
        call = CallKeys(groups, self.get_seq_length(), first, texts.block.modules)
        return GroupedKeys.of(call, key_states), GroupedKeys.of(call, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are over all columns, whichever of them are still there."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """The number of columns so far."""
        return self._groups[0].length if self._groups else 0

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1

    def activate_past_recording(self) -> None:
        """Keep what leaves the windows until the next `crop`."""
        self.record_past = True
        for group in self._groups:
            group.is_recording = True

    def check_crop(self, n: int) -> None:
        """Raise if the last `n` tokens cannot be taken back."""
        for group in self._groups:
            if not group.can_crop(n):
                raise ArgumentError(
                    f"CachePlan.cache: crop of {n} tokens of {group.length}, but heads of layer "
                    f"{self.index} have dropped all but the last {group.window} tokens. Call "
                    f"activate_past_recording() before, or run the text again."
                )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; their number is negative, as in transformers."""
        for group in self._groups:
            group.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Drop all tokens, and free their memory."""
        self._groups, self.is_initialized = [], False

    def reorder_cache(self, beam_idx: Int[Tensor, " beams"]) -> None:
        """Keep the rows of some beams."""
        for group in self._groups:
            group.select(beam_idx)
        self.batch = len(beam_idx) if self._groups else 0


class HeadCacheBesideLinear(LinearAttentionLayer, HeadCacheLayer):  # type: ignore[misc]
    """The cache of a layer whose attention runs beside a linear layer, with states of its own."""

    is_compileable = False  # else `generate` makes the masks itself, without the padding

    def __init__(self, *args: Any, number_of_states: int) -> None:
        HeadCacheLayer.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states)

    @property
    def nbytes(self) -> int:
        """The bytes of the storages of all heads, and of the states."""
        return HeadCacheLayer.nbytes.__get__(self) + _bytes_of_states(self)

    def lazy_initialization(self, *keys_values: Any, **states: Any) -> None:
        """Initialize what is cached first: keys and values, or a state."""
        part = HeadCacheLayer if keys_values else LinearAttentionLayer
        part.lazy_initialization(self, *keys_values, **states)

    def activate_past_recording(self) -> None:
        """Keep what leaves the windows and the states until the next `crop`."""
        LinearAttentionLayer.activate_past_recording(self)
        HeadCacheLayer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; their number is negative, as in transformers."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        HeadCacheLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Drop all tokens and states."""
        LinearAttentionLayer.reset(self)
        HeadCacheLayer.reset(self)

    def reorder_cache(self, beam_idx: Int[Tensor, " beams"]) -> None:
        """Keep the rows of some beams."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        HeadCacheLayer.reorder_cache(self, beam_idx)


def _bytes_of_states(layer: Any) -> int:
    """The bytes of the states of a linear layer of transformers; 0 for a layer without any."""
    states = [getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")]
    return sum(x.nbytes for each in states for x in each.values() if x is not None)


class HeadCache(Cache):  # type: ignore[misc]
    """The keys and values of one batch of texts, each kv head with the tokens that it needs.

    It is passed as the cache of the model that it was made for, while its block runs. Layers that
    do not attend keep the caches that transformers gives them.
    """

    def __init__(
        self,
        texts: TextBatch,
        windows: Mapping[int, Windows],
        sinks: int,
        layers: Sequence[Any],
    ) -> None:
        self.texts = texts
        own: list[Any] = []
        for layer in layers:
            index = sum(isinstance(before, HeadCacheLayer) for before in own)
            limit = getattr(layer, "sliding_window", None)
            if isinstance(layer, _ATTEND_BESIDE):
                states = {"number_of_states": layer.number_of_states}
                layer = HeadCacheBesideLinear(index, windows.get(index), sinks, limit, **states)
            elif isinstance(layer, _ATTEND):
                layer = HeadCacheLayer(index, windows.get(index), sinks, limit)
            own.append(layer)
        super().__init__(layers=own)

    @property
    def attending(self) -> list[HeadCacheLayer]:
        """The layers that attend; those of a plan."""
        return [layer for layer in self.layers if isinstance(layer, HeadCacheLayer)]

    @property
    def nbytes(self) -> int:
        """The bytes that the cache holds: of whole storages, reserved slots included, and of the
        states of linear layers."""
        attending = self.attending
        others = [layer for layer in self.layers if layer not in attending]
        return sum(layer.nbytes for layer in attending) + sum(map(_bytes_of_states, others))

    @property
    def batch_size(self) -> int:
        """The number of rows; −1 for an empty cache."""
        first = self.attending[0]
        return first.batch if first.is_initialized else -1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of a layer."""
        if layer_idx >= len(self.layers):
            raise ArgumentError(
                f"CachePlan.cache: there is no layer {layer_idx}; the plan has "
                f"{len(self.layers)} layers. Use a plan for this model."
            )
        kwargs["texts"] = self.texts
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: `crop(-3)` forgets three.

        Raises:
            ArgumentError: the number is above 0 or beyond the text, or the windows have dropped
                what came before those tokens.
            UnsupportedError: a linear layer keeps a recurrent state, as in most hybrids.
        """
        if not -self.get_seq_length() <= tokens_to_remove <= 0:
            raise ArgumentError(
                f"CachePlan.cache: crop({tokens_to_remove}) of {self.get_seq_length()} tokens. "
                f"Give a number from {-self.get_seq_length()} to 0: how many to forget."
            )
        for index, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionLayer) and not layer.is_croppable:
                raise UnsupportedError(
                    f"CachePlan.cache: crop({tokens_to_remove}), but layer {index} of the model "
                    f"keeps a state of all tokens, from which none can be taken back. Call "
                    f"cache.reset() and run the text again."
                )
        for layer in self.attending:
            layer.check_crop(-tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Drop all tokens, so that the cache may be used for another text."""
        self.texts.reset()
        super().reset()

    def reorder_cache(self, beam_idx: Int[Tensor, " beams"]) -> None:
        """Keep the rows of some beams; a row may be repeated."""
        super().reorder_cache(beam_idx)
        self.texts.select(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " B"] | Bool[Tensor, " B"]) -> None:
        """Keep some rows of the batch."""
        index = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.reorder_cache(index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.batch_size > 0:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))


@contextmanager
def open_cache(
    model: nn.Module, windows: Mapping[int, Windows], sinks: int, layers: Sequence[Any]
) -> Iterator[HeadCache]:
    """A cache for one batch of texts of a model, usable while the block runs.

    Args:
        windows: For each layer that attends the window of each kv head, None for all tokens; heads
            of layers that are not named keep all tokens.
        layers: The layers of the model's own cache, from `own_layers`.
    Raises:
        UnsupportedError: a layer of the model does not read the cache through the attention
            interface of transformers.
    """
    block = CacheBlock(model)
    with Hooks() as hooks:
        hooks.enter_context(wrapped_interface(attend_cached, CACHES))
        hooks.callback(setattr, block, "is_open", False)
        # The base model may be called without the head around it.
        for module in {id(m): m for m in (model, getattr(model, "base_model", model))}.values():
            _follow(hooks, module, block)
        _check_prompts(hooks, model, block)
        yield HeadCache(TextBatch(block), windows, sinks, layers)


def own_layers(model: nn.Module) -> list[Any]:
    """The layers of the cache that transformers makes for a model.

    Raises:
        UnsupportedError: the model has no such cache, or a layer caches what no plan can cover.
    """
    name = type(model).__name__
    config: Any = model.config
    if config.is_encoder_decoder:
        raise UnsupportedError(
            f"CachePlan: {name} is an encoder-decoder, whose cross-attention has a cache of its "
            f"own. Give a decoder."
        )
    if cache_argument(model) is None:
        raise UnsupportedError(f"CachePlan: {name} reads no cache. Give a decoder, not an encoder.")
    layers: list[Any] = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        if type(layer) not in (*_ATTEND, *_ATTEND_BESIDE, LinearAttentionLayer, DummyLayer):
            indexed = hasattr(layer, "update_indexer")
            why = "an indexer chooses the keys of" if indexed else "it holds entries shared by"
            raise UnsupportedError(
                f"CachePlan: layer {index} of {name} has a {type(layer).__name__}: {why} all "
                f"heads, so none can keep tokens of its own. Use the cache of transformers."
            )
    if not any(map(attends, layers)):
        raise UnsupportedError(f"CachePlan: no layer of {name} caches keys. Give one that attends.")
    return layers


def attends(layer: Any) -> bool:
    """Whether a layer of a cache of transformers holds keys and values."""
    return isinstance(layer, (*_ATTEND, *_ATTEND_BESIDE))


def _follow(hooks: Hooks, module: nn.Module, block: CacheBlock) -> None:
    """Note what each forward pass of a module with a cache of the block reads, and check that the
    keys of all of its layers came into the cache."""
    signature = inspect.signature(module.forward)

    def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        try:
            return signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # the model says what is wrong
            return {}

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = inputs_of(args, kwargs)
        cache = block.cache_in(inputs)
        if cache is not None:
            cache.texts.begin({**inputs.get("kwargs", {}), **inputs}, cache.get_seq_length())

    def end(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = block.cache_in(inputs_of(args, kwargs))
        if cache is None:
            return
        for layer in cache.attending:
            length = layer.get_seq_length()
            if length != cache.texts.n_columns:
                raise UnsupportedError(
                    f"CachePlan.cache: layer {layer.index} of {type(module).__name__} has cached "
                    f"{length} of {cache.texts.n_columns} tokens. Give a decoder whose layers all "
                    f"cache their keys."
                )

    hooks.before(module, begin, with_kwargs=True)
    hooks.after(module, end, with_kwargs=True)


def _check_prompts(hooks: Hooks, model: nn.Module, block: CacheBlock) -> None:
    """Check that a prompt of `generate` continues the text of the cache.

    A forward pass in `generate` reads the new tokens alone, and often no mask, so the text can be
    compared only here.
    """
    generate: Callable[..., Any] | None = getattr(model, "generate", None)
    if generate is None:
        return
    if "generate" in model.__dict__:
        hooks.callback(setattr, model, "generate", generate)
    else:
        hooks.callback(delattr, model, "generate")

    @wraps(generate)
    def checked(*args: Any, **kwargs: Any) -> Any:
        cache = block.cache_in(kwargs)
        if cache is not None:
            ids = [*args, kwargs.get("inputs"), kwargs.get("input_ids")]
            prompt = next((x for x in ids if isinstance(x, Tensor)), None)
            mask, n_cached = kwargs.get("attention_mask"), cache.get_seq_length()
            cache.texts.check_text(prompt, mask, n_cached)
        return generate(*args, **kwargs)

    vars(model)["generate"] = checked


def attend_cached(
    attend: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attend to cached keys; all other calls go to the implementation of the model.

    Raises:
        ArgumentError: the cache belongs to another model.
        UnsupportedError: the module attends in both directions, or the call asks for weights,
            drops some, or adds a bias by position.
    """
    if not isinstance(key, GroupedKeys):
        return attend(module, query, key, value, attention_mask, *args, **kwargs)
    if id(module) not in key.call.modules:
        raise ArgumentError(
            f"CachePlan.cache: {type(module).__name__} belongs to another model than this cache. "
            f"Enter plan.cache(model) for the model that runs."
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedError(
            f"CachePlan.cache: {type(module).__name__} attends in both directions, as in an "
            f"encoder. Give a decoder."
        )
    name = type(module).__name__
    # Also for heads that keep all tokens, so that a model is refused when it is planned.
    for argument in ("indices", "position_bias", "sinks"):
        if kwargs.get(argument) is not None:
            raise UnsupportedError(
                f"CachePlan.cache: {name} gives {argument} to its attention, which cannot be read "
                f"for heads that keep different tokens. Use the cache of transformers."
            )
    plain = key.call.plain
    if plain is not None and plain.start == 0:
        return attend(module, query, *plain.near, attention_mask, *args, **kwargs)
    if plain is not None and (attention_mask is None or isinstance(attention_mask, Tensor)):
        mask = None if attention_mask is None else attention_mask[..., plain.start :]
        return attend(module, query, *plain.near, mask, *args, **kwargs)
    call = Call.of(module, implementation, query, key, value, attention_mask, kwargs)
    if call.needs_weights:
        raise UnsupportedError(
            f"CachePlan.cache: {name} should return weights, but its heads keep different tokens. "
            f"Leave output_attentions out; headwise.observe tells what each head sees."
        )
    if kwargs.get("dropout"):
        raise UnsupportedError(
            f"CachePlan.cache: {name} has dropout {kwargs['dropout']}. Call model.eval() before."
        )
    # Some models view the heads of a token as one vector.
    return key.call.attend(query, call.rule()).transpose(1, 2).contiguous(), None


@contextmanager
def streaming(
    model: nn.Module,
    gates: Sequence[Float[Tensor, "*B n"]],
    kept: tuple[int, int],
    first: Int[Tensor, " B"] | None,
) -> Iterator[None]:
    """Mix what kv heads read with what they would read if they streamed; differentiable.

    The model runs without a cache while the block runs.

    Args:
        gates: For each layer that caches keys a gate for each kv head, optionally per text: 1
            reads all tokens, 0 streams.
        kept: How many of the first tokens a streaming head reads, and how many of the latest.
        first: The column of the first token of each text; None if no row is padded.
    Raises:
        UnsupportedError: other layers attend than those that cache keys.
    """
    modules = {id(module) for module in model.modules()}
    read: list[Tensor] = []  # kept alive, so that no other keys get their memory

    def mix(
        attend: Callable[..., Any], implementation: str, module: nn.Module, *args: Any, **more: Any
    ) -> Any:
        heads, *others = attend(module, *args, **more)
        if id(module) not in modules:
            return heads, *others
        query, key, value, mask = args[:4]
        # Layers that read the keys of an earlier one are gated with it.
        known = [layer for layer, x in enumerate(read) if x.data_ptr() == key.data_ptr()]
        layer = known[0] if known else len(read)
        if not known:
            read.append(key)
        if layer >= len(gates) or gates[layer].shape[-1] != key.shape[1]:
            raise UnsupportedError(
                f"cache_plan: attention {len(read)} of {type(model).__name__} reads {key.shape[1]} "
                f"kv heads, but its layers cache {[gate.shape[-1] for gate in gates]}. Name the "
                f"heads: full={{layer: [kv heads]}}."
            )
        gate = gates[layer]
        if not gate.requires_grad and bool((gate == 1).all()):
            return heads, *others
        call = Call.of(module, implementation, query, key, value, mask, more)
        streamed = streaming_heads(*call.inputs(), call.rule(), kept, first).transpose(1, 2)
        gate = gate.repeat_interleave(query.shape[1] // gate.shape[-1], -1)
        gate = gate.reshape(-1, 1, gate.shape[-1], 1).to(heads.dtype)
        return heads * gate + streamed.to(heads.dtype) * (1 - gate), *others

    with wrapped_interface(mix, STREAMS):
        yield
