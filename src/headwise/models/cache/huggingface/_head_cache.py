"""A Hugging Face cache whose kv heads keep different tokens, and the model that it belongs to."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.cache_utils import Cache

from headwise.errors import ArgumentError
from headwise.models.cache._texts import TextBatch
from headwise.models.cache.huggingface._layer import HeadCacheLayer, Windows


class HeadCache(Cache):  # type: ignore[misc]
    """The keys and values of one batch of texts, each kv head with the tokens that it needs.

    It is passed as the cache of the model that it was made for, while its block runs.
    """

    def __init__(
        self,
        texts: TextBatch,
        windows: Mapping[int, Windows],
        sinks: int,
        sliding: Sequence[int | None],
    ) -> None:
        self.texts = texts
        super().__init__(
            layers=[
                HeadCacheLayer(layer, windows.get(layer), sinks, limit, texts)
                for layer, limit in enumerate(sliding)
            ]
        )

    @property
    def nbytes(self) -> int:
        """The bytes that the cache holds: of whole storages, reserved slots included."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def batch_size(self) -> int:
        """The number of rows; −1 for an empty cache."""
        batch = self.layers[0].batch if self.layers else None
        return -1 if batch is None else batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of a layer."""
        if layer_idx >= len(self.layers):
            raise ArgumentError(
                f"CachePlan.cache: there is no layer {layer_idx}; the plan has "
                f"{len(self.layers)} layers. Use a plan for this model."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: `crop(-3)` forgets three.

        Raises:
            ArgumentError: the number is above 0 or beyond the text, or the windows have dropped
                what came before those tokens.
        """
        if not -self.get_seq_length() <= tokens_to_remove <= 0:
            raise ArgumentError(
                f"CachePlan.cache: crop({tokens_to_remove}) of {self.get_seq_length()} tokens. "
                f"Give a number from {-self.get_seq_length()} to 0: how many to forget."
            )
        for layer in self.layers:
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
