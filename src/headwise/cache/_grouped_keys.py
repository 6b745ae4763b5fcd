"""What a layer's cache returns in place of keys: a tensor that only our attention can read."""

from collections.abc import Collection
from functools import cached_property, lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise._torch_private import without_tensor_subclasses
from headwise.attention import DESCRIPTIONS
from headwise.cache._attend import (
    StreamingMask,
    attend_streaming,
    attend_with,
    rule_of_columns,
    rule_of_heads,
)
from headwise.cache._storage import Entries, HeadGroup, KeysValues
from headwise.errors import UnsupportedError
from headwise.kernels import AttentionRule


# 31 µs for each layer and token that is decoded, and on a GPU copies from the host.
@lru_cache(256)
def _query_heads(
    groups: tuple[tuple[int, ...], ...], n_heads: int, device: torch.device
) -> tuple[list[Int[Tensor, " n"]], Int[Tensor, " H"]]:
    """The query heads that read the kv heads of each group, and where each query head is after the
    groups were put side by side."""
    share = n_heads // sum(map(len, groups))
    heads = [
        torch.tensor([kv * share + nth for kv in group for nth in range(share)]) for group in groups
    ]
    places = torch.cat(heads).argsort()
    return [x.to(device) for x in heads], places.to(device)


class CallKeys:
    """What the queries of one call may read of a layer's cache.

    Attributes:
        groups: The kv heads that keep the same tokens, and what the queries may read of them.
        numbers: The indices in the layer of the kv heads of each group.
        n_columns: The number of columns up to the last query.
        first: The column of the first token of each text; None if no row is padded.
        modules: The modules of the model that the cache belongs to, by identity.
    """

    def __init__(
        self,
        groups: list[tuple[HeadGroup, Entries]],
        n_columns: int,
        first: Int[Tensor, " B"] | None,
        modules: Collection[int] = (),
    ) -> None:
        self.groups, self.n_columns, self.first = groups, n_columns, first
        self.modules = modules
        self.numbers = tuple(group.numbers for group, _ in groups)

    @property
    def plain(self) -> Entries | None:
        """What the cache of transformers would give, if all heads keep that."""
        _, entries = self.groups[0]
        return entries if len(self.groups) == 1 and entries.far is None else None

    def attend(self, q: Float[Tensor, "B H T D"], rule: AttentionRule) -> Tensor:
        """The heads of all queries, each group on its own keys."""
        if len(self.groups) == 1:
            return self._attend_group(q, *self.groups[0], rule)
        heads_of_groups, places = _query_heads(self.numbers, q.shape[1], q.device)
        parts = []
        for heads, (group, entries) in zip(heads_of_groups, self.groups, strict=True):
            group_rule = rule_of_heads(rule, heads, q.shape[2], self.n_columns)
            parts.append(self._attend_group(q.index_select(1, heads), group, entries, group_rule))
        return torch.cat(parts, 1).index_select(1, places)

    def _attend_group(
        self, q: Tensor, group: HeadGroup, entries: Entries, rule: AttentionRule
    ) -> Tensor:
        if entries.far is None or group.window is None or group.sinks is None:
            return attend_with(q, entries.near, rule_of_columns(rule, q, entries))
        is_plain = rule.visible is None and rule.bias is None and self.first is None
        if q.shape[2] == 1 and is_plain:  # one query sees all keys of its window: no mask
            start = max(entries.start, self.n_columns - group.window)
            near = entries.near.slice(start - entries.start)
            return attend_with(q, entries.far.slice(0, start).followed_by(near), rule)
        kept = group.sinks, group.window
        return attend_streaming(q, entries, rule, kept, self.n_columns, self.first)

    def mask(self, n_heads: int) -> StreamingMask:
        """What the windows of the query heads let them see."""
        windows, starts = torch.zeros(2, n_heads, dtype=torch.long)
        sinks = 0
        heads_of_groups, _ = _query_heads(self.numbers, n_heads, windows.device)
        for heads, (group, entries) in zip(heads_of_groups, self.groups, strict=True):
            is_streaming = group.window is not None and group.sinks is not None
            windows[heads] = group.window if is_streaming else self.n_columns
            starts[heads] = 0 if is_streaming else entries.start
            sinks = max(sinks, group.sinks or 0)
        return StreamingMask(sinks, windows, starts, self.first)

    @cached_property
    def dense(self) -> KeysValues:
        """Keys and values of all heads over all columns, zeros where a head has dropped them."""

        def dense(of: int) -> Tensor:
            like = self.groups[0][1].near[of]
            n_kv_heads = sum(len(group.numbers) for group, _ in self.groups)
            shape = len(like), n_kv_heads, self.n_columns + 1, like.shape[3]
            whole = like.new_zeros(*shape)
            for group, (near, start, far, columns) in self.groups:
                part = like.new_zeros(len(like), len(group.numbers), *shape[2:])
                if far is not None and columns is not None:
                    # A token that is not there yet goes into a column that is cut off.
                    at = columns.where(columns >= 0, self.n_columns)[:, None, :, None]
                    part.scatter_(2, at.expand(*far[of].shape), far[of])
                part[:, :, start : start + near[of].shape[2]] = near[of]
                whole[:, group.heads] = part
            return whole[:, :, : self.n_columns]

        return KeysValues(dense(0), dense(1))


class GroupedKeys(Tensor):
    """Keys or values of a cache whose heads keep different tokens, of the shape of all tokens.

    Attributes:
        call: What our attention reads instead.
    """

    call: CallKeys

    @classmethod
    def of(cls, call: CallKeys, like: Float[Tensor, "B Hkv T D"]) -> "GroupedKeys":
        """The keys of a call, which take no memory."""
        B, heads, _, width = like.shape
        keys = like.detach().new_zeros(()).expand(B, heads, call.n_columns, width)
        keys = keys.as_subclass(cls)
        keys.call = call
        return keys

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Whatever reads values is refused: a model that multiplies these keys by itself would
        # get zeros, and no error.
        if func in DESCRIPTIONS:
            with without_tensor_subclasses():
                return func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            raise UnsupportedError(
                "CachePlan.cache: the model makes the keys of all heads from what it caches, as "
                "from the latents of MLA. No head can drop tokens that the others read: use the "
                "cache of transformers for this model."
            )
        raise UnsupportedError(
            f"CachePlan.cache: the model calls {getattr(func, '__name__', func)} on cached keys "
            f"outside of the attention interface of transformers, where heads that keep different "
            f"tokens cannot be read. Use the cache of transformers for this model."
        )
