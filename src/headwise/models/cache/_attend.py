"""Attention of query heads to a cache that has dropped some of the keys."""

from dataclasses import replace
from functools import reduce
from operator import and_

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.kernels import AttentionRule, TensorBias, attend, autocast_inputs
from headwise.masks import Mask, Window, as_mask
from headwise.masks.tiles import Tile
from headwise.models.cache._storage import KeysValues, RecentKeys, SlotKeys

# Queries that are computed together read the keys of their window and of one another.
_ROWS = 128


def attend_with(
    q: Float[Tensor, "B H T D"], keys: KeysValues, rule: AttentionRule
) -> Float[Tensor, "B H T Dv"]:
    """The heads of queries that follow a rule."""
    heads = attend(
        *autocast_inputs(q, *keys),
        mask=rule.visible,
        bias=rule.bias,
        scale=rule.scale,
        softcap=rule.softcap,
        sinks=rule.sinks,
    )
    assert isinstance(heads, Tensor)
    return heads


def rule_of_heads(rule: AttentionRule, heads: Int[Tensor, " n"], T: int, S: int) -> AttentionRule:
    """The rule for some of the query heads that it is for."""
    if rule.sinks is not None:
        rule = replace(rule, sinks=rule.sinks[heads.to(rule.sinks.device)])
    if rule.visible is not None and rule.visible.batch[1] > 1:
        whole = Tile.whole(T, S, heads.device)
        rule = replace(rule, visible=as_mask(rule.visible.tile(whole)[:, heads]))
    if rule.bias is not None and rule.bias.batch[1] > 1:
        whole = Tile.whole(T, S, heads.device)
        rule = replace(rule, bias=TensorBias(rule.bias.tile(whole)[:, heads]))
    return rule


class StreamingRule:
    """The rule of heads that see the first `sinks` tokens of each text and the last `window`.

    Args:
        rule: What the model itself hides besides, over all columns.
        n_columns: The number of columns up to the last query.
        first: The column of the first token of each text; None if no row is padded.
    """

    def __init__(
        self,
        rule: AttentionRule,
        sinks: int,
        window: int,
        n_columns: int,
        first: Int[Tensor, " B"] | None,
    ) -> None:
        self._rule, self._sinks, self._window = rule, sinks, window
        self._S, self._first = n_columns, first
        visible = rule.visible
        # What is visible in a window is computed here anyway.
        self._is_causal = isinstance(visible, Window) and visible == Window(None, 0)

    def attend_one(self, q: Tensor, slots: SlotKeys) -> Float[Tensor, "B H 1 Dv"]:
        """One query that reads keys in any order."""
        rule, positions = self._rule, slots.positions
        if positions is None and rule.visible is None and rule.bias is None:
            return attend_with(q, slots.keys, rule)
        if positions is None:
            n = slots.keys.k.shape[2]
            positions = self._all_positions(n, q.device)
        last = self._S - 1 - self._starts(q.device)
        visible = (positions >= 0) & ((positions < self._sinks) | (positions > last - self._window))
        columns = (positions + self._starts(q.device)).clamp(min=0)
        tile = Tile(1, self._S, range(1), range(self._S), q.device)
        masks = [visible[:, None, None]]
        if rule.visible is not None:
            masks.append(_gathered(rule.visible.tile(tile), columns))
        bias = None if rule.bias is None else TensorBias(_gathered(rule.bias.tile(tile), columns))
        return attend_with(q, slots.keys, self._with(reduce(and_, masks), bias))

    def attend_many(self, q: Tensor, recent: RecentKeys) -> Float[Tensor, "B H T Dv"]:
        """Several queries, in blocks that read their windows alone."""
        T, parts = q.shape[2], []
        rows = max(_ROWS, self._window // 2)
        for start in range(0, T, rows):
            block = range(start, min(start + rows, T))
            parts.append(self._attend_block(q[:, :, start : block.stop], recent, block, T))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _attend_block(
        self, q: Tensor, recent: RecentKeys, block: range, T: int
    ) -> Float[Tensor, "B H R Dv"]:
        before = self._S - T
        start = max(recent.start, before + block.start - self._window + 1)
        keys = range(start, before + block.stop)
        inside = slice(start - recent.start, keys.stop - recent.start)
        near = recent.keys.map(lambda x: x[:, :, inside])
        visible, bias = self._near(block, keys, T, q.device)
        n_sinks = recent.sinks.k.shape[2]
        if start > 0 and n_sinks:
            pairs = zip(recent.sinks, near, strict=True)
            near = KeysValues(*(torch.cat(pair, 2) for pair in pairs))
            first_visible, first_bias = self._first_tokens(block, start, n_sinks, T, q.device)
            visible = _joined(first_visible, visible)
            bias = None if bias is None else _joined(first_bias, bias)
        total = None if bias is None else TensorBias(bias)
        return attend_with(q, near, self._with(visible, total))

    def _near(
        self, block: range, keys: range, T: int, device: torch.device
    ) -> tuple[Bool[Tensor, "#B #H R n"], Tensor | None]:
        """What queries see of keys in consecutive columns, and the bias."""
        tile = Tile(T, self._S, block, keys, device)
        positions = tile.key_at - self._starts(device)  # b n
        is_sink = ((positions >= 0) & (positions < self._sinks))[:, None, None]
        ahead = tile.key_at - tile.query_at
        visible = (ahead <= 0) & (is_sink | (ahead > -self._window))
        if self._rule.visible is not None and not self._is_causal:
            visible = visible & self._rule.visible.tile(tile)
        return visible, None if self._rule.bias is None else self._rule.bias.tile(tile)

    def _first_tokens(
        self, block: range, start: int, n: int, T: int, device: torch.device
    ) -> tuple[Bool[Tensor, "#B #H R n"], Tensor | None]:
        """What queries see of the first tokens before column `start`, and the bias."""
        columns = self._starts(device) + torch.arange(n, device=device)  # b n
        stop = min(self._S, int(columns.max()) + 1)
        tile = Tile(T, self._S, block, range(stop), device)
        visible = (columns < start)[:, None, None].expand(-1, 1, len(block), -1)
        columns = columns.clamp(max=stop - 1)
        if self._rule.visible is not None and not self._is_causal:
            visible = visible & _gathered(self._rule.visible.tile(tile), columns)
        bias = self._rule.bias
        return visible, None if bias is None else _gathered(bias.tile(tile), columns)

    def _starts(self, device: torch.device) -> Int[Tensor, "#B 1"]:
        if self._first is None:
            return torch.zeros(1, 1, dtype=torch.long, device=device)
        return self._first.to(device)[:, None]

    def _all_positions(self, n: int, device: torch.device) -> Int[Tensor, "1 n"]:
        """The positions of the tokens in `n` full slots: sinks first, then a ring of the window."""
        slot, last = torch.arange(n, device=device)[None], self._S - 1
        return torch.where(slot < self._sinks, slot, last - (last - slot) % self._window)

    def _with(self, visible: Tensor, bias: TensorBias | None) -> AttentionRule:
        mask: Mask = as_mask(visible)
        return replace(self._rule, visible=mask, bias=bias)


def _gathered(x: Tensor, columns: Int[Tensor, "#B n"]) -> Tensor:
    """The entries of a mask or bias at some columns of each row."""
    if x.shape[-1] == 1:
        return x
    B = max(len(x), len(columns))
    index = columns[:, None, None].expand(B, x.shape[1], x.shape[2], -1)
    return x.expand(B, -1, -1, -1).gather(3, index)


def _joined(left: Tensor | None, right: Tensor) -> Tensor:
    """Two masks or biases side by side."""
    assert left is not None
    shape = [max(sizes) for sizes in zip(left.shape[:3], right.shape[:3], strict=True)]
    return torch.cat([x.expand(*shape, x.shape[3]) for x in (left, right)], 3)
