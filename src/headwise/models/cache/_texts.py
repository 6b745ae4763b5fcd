"""The batch of texts that a cache holds: where each begins, and its tokens."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.errors import ArgumentError


class TextBatch:
    """What the forward passes of a model have read into a cache.

    Attributes:
        modules: The modules of the model, by identity.
        first: The column of the first token of each text; None if no row is padded.
        is_open: Whether the block of the cache runs.
        n_columns: The number of columns after the forward pass that runs; −1 before the first.
    """

    def __init__(self, modules: Collection[int]) -> None:
        self.modules = frozenset(modules)
        self.first: Int[Tensor, " B"] | None = None
        self.is_open = True
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
        if not self.is_open:
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
            ids: The whole text, or its next chunk: then the mask has the cached columns too.
        """
        if not n_cached or self._ids is None or not isinstance(ids, Tensor):
            return
        if isinstance(mask, Tensor) and mask.shape[-1] == n_cached + ids.shape[1]:
            return
        text = self._ids[:, :n_cached]
        if ids.shape[1] >= n_cached and torch.equal(ids[:, :n_cached], text):
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
    if before is not None and bool(((before != first) & (before < n_cached)).any()):
        raise ArgumentError(
            f"CachePlan.cache: texts begin at columns {first.tolist()}, but at {before.tolist()} "
            f"in the cache. Enter plan.cache(model) again for each text."
        )
    if before is None and bool(((first < n_cached) & (first > 0)).any()):
        raise ArgumentError(
            f"CachePlan.cache: texts begin at columns {first.tolist()}, but at 0 in the cache. "
            f"Enter plan.cache(model) again for each text."
        )
    return first if bool(first.any()) else None
