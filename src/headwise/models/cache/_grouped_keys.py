"""What a layer's cache returns in place of keys: a tensor that only our attention can read."""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise._torch_private import without_tensor_subclasses
from headwise.errors import UnsupportedError
from headwise.kernels import AttentionRule
from headwise.models.attention import DESCRIPTIONS
from headwise.models.cache._attend import StreamingRule, attend_with, rule_of_heads
from headwise.models.cache._storage import (
    FullGroup,
    HeadGroup,
    KeysValues,
    RecentKeys,
    SlotKeys,
    StreamingGroup,
)
from headwise.models.cache._windows import StreamingMask

Entries = KeysValues | SlotKeys | RecentKeys


class QueryHeads:
    """Which query heads of a layer read the kv heads of each group.

    Attributes:
        n_kv_heads: The number of kv heads of the layer.
    """

    def __init__(self, groups: Sequence[HeadGroup]) -> None:
        self._groups = [group.heads for group in groups]
        self.n_kv_heads = sum(map(len, self._groups))
        self._known: dict[tuple[int, torch.device], list[Int[Tensor, " n"]]] = {}

    def of_groups(self, n_heads: int, device: torch.device) -> list[Int[Tensor, " n"]]:
        """The query heads of each group, among so many."""
        return self._indices(n_heads, device)[:-1]

    def places(self, n_heads: int, device: torch.device) -> Int[Tensor, " H"]:
        """Where each query head is after the groups were put side by side."""
        return self._indices(n_heads, device)[-1]

    def _indices(self, n_heads: int, device: torch.device) -> list[Int[Tensor, " n"]]:
        known = self._known.get((n_heads, device))
        if known is None:
            share = n_heads // self.n_kv_heads
            within = torch.arange(share)
            rows = [(heads.cpu()[:, None] * share + within).flatten() for heads in self._groups]
            known = [x.to(device) for x in (*rows, torch.cat(rows).argsort())]
            self._known[n_heads, device] = known
        return known


class CallKeys:
    """What the queries of one call may read of a layer's cache.

    Attributes:
        groups: The kv heads that keep the same tokens, and what the queries may read of them.
        query_heads: The query heads that read each group.
        n_columns: The number of columns up to the last query.
        first: The column of the first token of each text; None if no row is padded.
        modules: The modules of the model that the cache belongs to, by identity.
    """

    def __init__(
        self,
        groups: list[tuple[HeadGroup, Entries]],
        query_heads: QueryHeads,
        n_columns: int,
        first: Int[Tensor, " B"] | None,
        modules: Collection[int] = (),
    ) -> None:
        self.groups, self.query_heads = groups, query_heads
        self.n_columns, self.first, self.modules = n_columns, first, modules

    @property
    def plain(self) -> KeysValues | None:
        """Keys and values of all heads over all columns, if none keeps fewer."""
        _group, entries = self.groups[0]
        return entries if len(self.groups) == 1 and isinstance(entries, KeysValues) else None

    def attend(self, q: Float[Tensor, "B H T D"], rule: AttentionRule) -> Tensor:
        """The heads of all queries, each group on its own keys."""
        H, T = q.shape[1:3]
        if len(self.groups) == 1:
            return self._attend_group(q, *self.groups[0], rule)
        parts = []
        for rows, (group, entries) in zip(
            self.query_heads.of_groups(H, q.device), self.groups, strict=True
        ):
            group_rule = rule_of_heads(rule, rows, T, self.n_columns)
            parts.append(self._attend_group(q.index_select(1, rows), group, entries, group_rule))
        return torch.cat(parts, 1).index_select(1, self.query_heads.places(H, q.device))

    def _attend_group(
        self, q: Tensor, group: HeadGroup, entries: Entries, rule: AttentionRule
    ) -> Tensor:
        if isinstance(entries, KeysValues):
            return attend_with(q, entries, rule)
        assert isinstance(group, StreamingGroup)
        streaming = StreamingRule(rule, group.sinks, group.window, self.n_columns, self.first)
        if isinstance(entries, SlotKeys):
            return streaming.attend_one(q, entries)
        return streaming.attend_many(q, entries)

    def mask(self, n_heads: int) -> StreamingMask:
        """What the windows of the query heads let them see."""
        windows = torch.zeros(n_heads, dtype=torch.long)
        sinks = 0
        query_heads = self.query_heads.of_groups(n_heads, windows.device)
        for rows, (group, _) in zip(query_heads, self.groups, strict=True):
            is_full = isinstance(group, FullGroup)
            windows[rows] = self.n_columns if is_full else getattr(group, "window", 0)
            sinks = max(sinks, getattr(group, "sinks", 0))
        return StreamingMask(sinks, windows, self.first)

    @cached_property
    def dense(self) -> KeysValues:
        """Keys and values of all heads over all columns, zeros where a head has dropped them."""
        group, entries = self.groups[0]
        like = entries if isinstance(entries, KeysValues) else entries.keys
        shape = like.k.shape[0], self.query_heads.n_kv_heads, self.n_columns
        dense = like.map(lambda x: x.new_zeros(*shape, x.shape[3]))
        for group, entries in self.groups:
            for whole, part in zip(dense, self._spread(group, entries), strict=True):
                whole[:, group.heads] = part
        return dense

    def _spread(self, group: HeadGroup, entries: Entries) -> KeysValues:
        """The keys of a group in their columns."""
        if isinstance(entries, KeysValues):
            return entries
        assert isinstance(group, StreamingGroup)
        keys = entries.keys
        n, device = keys.k.shape[2], keys.k.device
        starts = 0 if self.first is None else self.first.to(device)[:, None]
        if isinstance(entries, SlotKeys):
            positions = group.positions(n, self.first, device)
            return keys.map(lambda x: _scattered(x, positions, positions + starts, self.n_columns))
        columns = torch.arange(entries.start, entries.start + n, device=device)[None]
        n_sinks = entries.sinks.k.shape[2]
        sinks = torch.arange(n_sinks, device=device)[None]
        sinks = sinks.masked_fill(sinks + starts >= self.n_columns, -1)

        def spread(x: Tensor, first: Tensor) -> Tensor:
            near = _scattered(x, columns, columns, self.n_columns)
            far = _scattered(first, sinks, sinks + starts, self.n_columns)
            return torch.where(torch.arange(self.n_columns, device=device)[:, None] < entries.start,
                               far, near)  # fmt: skip

        return KeysValues(spread(keys.k, entries.sinks.k), spread(keys.v, entries.sinks.v))


def _scattered(x: Tensor, valid: Tensor, columns: Tensor, n_columns: int) -> Tensor:
    """The keys of slots in their columns; those with a negative number in `valid` are left out."""
    places = torch.where(valid >= 0, columns, n_columns)[:, None, :, None]
    whole = x.new_zeros(*x.shape[:2], n_columns + 1, x.shape[3])
    return whole.scatter(2, places.expand(*x.shape), x)[:, :, :n_columns]


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
        if func in DESCRIPTIONS:
            with without_tensor_subclasses():
                return func(*args, **(kwargs or {}))
        raise UnsupportedError(
            f"CachePlan.cache: the model calls {getattr(func, '__name__', func)} on cached keys "
            f"outside of the attention interface of transformers, where heads that keep different "
            f"tokens cannot be read. Use the cache of transformers for this model."
        )
