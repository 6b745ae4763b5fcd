"""A layer of a Hugging Face cache whose kv heads keep different tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from headwise.errors import ArgumentError, ShapeError
from headwise.models.cache._grouped_keys import CallKeys, GroupedKeys, QueryHeads
from headwise.models.cache._storage import FullGroup, HeadGroup, StreamingGroup
from headwise.models.cache._texts import TextBatch

# The last tokens that each kv head keeps; None for all tokens.
Windows = Sequence[int | None]


class HeadCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer: each kv head keeps all tokens, or the first and the latest.

    Attributes:
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
        batch: TextBatch,
    ) -> None:
        super().__init__()
        self.index, self.windows, self.sinks = index, windows, sinks
        self.sliding_window, self._texts = sliding_window, batch
        self._groups: list[HeadGroup] = []
        self._query_heads = QueryHeads([])
        self.token_bytes = 0
        self.record_past = False

    @property
    def nbytes(self) -> int:
        """The bytes of the storages of all heads."""
        return sum(group.nbytes for group in self._groups)

    @property
    def batch(self) -> int | None:
        """The number of rows in the batch; None for an empty cache."""
        return self._batch if self.is_initialized else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Group the kv heads that keep the same tokens."""
        n = key_states.shape[1]
        windows = [None] * n if self.windows is None else list(self.windows)
        if len(windows) != n:
            raise ArgumentError(
                f"CachePlan.cache: layer {self.index} has {n} kv heads, the plan has "
                f"{len(windows)}. Use a plan for this model."
            )
        self._batch, self.windows = len(key_states), windows
        self.token_bytes = sum(x.shape[3] * x.element_size() for x in (key_states, value_states))
        self._groups = []
        for window in sorted({self._kept(window) for window in windows}, key=_by_size):
            heads = [head for head in range(n) if self._kept(windows[head]) == window]
            self._groups.append(self._group(heads, *window))
        self._query_heads = QueryHeads(self._groups)
        self.is_initialized = True
        if self.record_past:
            self.activate_past_recording()

    def _kept(self, window: int | None) -> tuple[int, int | None]:
        """The first and the last tokens that a head keeps, in a layer with a window of its own."""
        limit = self.sliding_window
        if window is None or (limit is not None and window >= limit):
            return 0, limit
        return self.sinks, window

    def _group(self, heads: list[int], sinks: int, window: int | None) -> HeadGroup:
        return FullGroup(heads) if window is None else StreamingGroup(heads, sinks, window)

    def update(
        self,
        key_states: Float[Tensor, "B Hkv T D"],
        value_states: Float[Tensor, "B Hkv T Dv"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values; only our attention can read the tensors that are returned."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ArgumentError(
                "CachePlan.cache: the keys require gradients, which cannot pass through memory "
                "that is written in place. Run the model under torch.no_grad()."
            )
        self._texts.check_call(self.get_seq_length() + key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if len(key_states) != self._batch:
            raise ShapeError(
                f"CachePlan.cache: {len(key_states)} texts, but the cache holds {self._batch}. "
                f"Keep the batch size, or enter plan.cache(model) again."
            )
        first = self._texts.first
        groups: list[Any] = []
        for group in self._groups:
            if isinstance(group, StreamingGroup):
                groups.append((group, group.append(key_states, value_states, first)))
            elif isinstance(group, FullGroup):
                groups.append((group, group.append(key_states, value_states)))
        call = CallKeys(
            groups, self._query_heads, self.get_seq_length(), first, self._texts.modules
        )
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
            if isinstance(group, StreamingGroup):
                group.is_recording = True

    def check_crop(self, n: int) -> None:
        """Raise if the last `n` tokens cannot be taken back."""
        for group in self._groups:
            if isinstance(group, StreamingGroup) and not group.can_crop(n):
                raise ArgumentError(
                    f"CachePlan.cache: crop of {n} tokens of {group.length}, but heads of layer "
                    f"{self.index} have dropped all but the last {group.window} tokens. Call "
                    f"activate_past_recording() before, or run the text again."
                )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; their number is negative, as in transformers."""
        n, first = -tokens_to_remove, self._texts.first
        for group in self._groups:
            if isinstance(group, StreamingGroup):
                group.crop(n, first)
            elif isinstance(group, FullGroup):
                group.crop(n)

    def reset(self) -> None:
        """Drop all tokens, and free their memory."""
        self._groups, self.is_initialized = [], False

    def reorder_cache(self, beam_idx: Int[Tensor, " beams"]) -> None:
        """Keep the rows of some beams."""
        for group in self._groups:
            group.select(beam_idx)
        self._batch = len(beam_idx) if self._groups else 0


def _by_size(kept: tuple[int, int | None]) -> tuple[int, int]:
    sinks, window = kept
    return (1 << 62 if window is None else window), sinks
