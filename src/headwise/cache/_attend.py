"""Attention of query heads to a cache that has dropped some of the keys."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.cache._storage import Entries, KeysValues
from headwise.kernels import AttentionRule, Bias, TensorBias, attend, autocast_inputs
from headwise.masks import Mask, Window, as_mask
from headwise.masks.tiles import Tile

# Queries that are computed together read the keys of their window and of one another.
_ROWS = 128


@dataclass(frozen=True)
class StreamingMask(Mask):
    """Each head sees the first `sinks` tokens of the text and the last of its window.

    Attributes:
        sinks: The number of first tokens that every head sees.
        windows: For each head the number of latest tokens, the query's own included.
        starts: For each head the first column that is still there.
        first: The column of the first token of each text; None if no row is padded.
    """

    sinks: int
    windows: Int[Tensor, " H"]
    starts: Int[Tensor, " H"]
    first: Int[Tensor, " B"] | None = None

    def tile(self, tile: Tile) -> Bool[Tensor, "#B H R n"]:
        windows, starts = (
            x.to(tile.device)[None, :, None, None] for x in (self.windows, self.starts)
        )
        position = tile.key_at - _starts(self.first, tile.device)  # b n
        is_sink = ((position >= 0) & (position < self.sinks))[:, None, None]
        return (is_sink | (tile.query_at - tile.key_at < windows)) & (tile.key_at >= starts)

    @property
    def batch(self) -> tuple[int, int]:
        return 1 if self.first is None else len(self.first), len(self.windows)


def streaming_heads(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv T D"],
    v: Float[Tensor, "B Hkv T Dv"],
    rule: AttentionRule,
    kept: tuple[int, int],
    first: Int[Tensor, " B"] | None,
) -> Float[Tensor, "B H T Dv"]:
    """The heads of queries that see the first tokens of their text and the latest; differentiable.

    Args:
        rule: What the model itself hides besides.
        kept: How many of the first tokens are seen, and how many of the latest.
        first: The column of the first token of each text; None if no row is padded.
    """
    keys, T = KeysValues(k, v), k.shape[2]
    columns = _starts(first, k.device) + torch.arange(min(kept[0], T), device=k.device)
    index = columns.clamp(max=T - 1)[:, None, :, None]
    far = keys.map(lambda x: x.gather(2, index.expand(*x.shape[:2], -1, x.shape[3])))
    return attend_streaming(q, Entries(keys, 0, far, columns), rule, kept, T, first)


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
    whole = Tile.whole(T, S, heads.device)
    if rule.sinks is not None:
        rule = replace(rule, sinks=rule.sinks[heads.to(rule.sinks.device)])
    if rule.visible is not None and rule.visible.batch[1] > 1:
        rule = replace(rule, visible=as_mask(rule.visible.tile(whole)[:, heads]))
    if rule.bias is not None and rule.bias.batch[1] > 1:
        rule = replace(rule, bias=TensorBias(rule.bias.tile(whole)[:, heads]))
    return rule


def rule_of_columns(
    rule: AttentionRule, q: Float[Tensor, "B H T D"], entries: Entries
) -> AttentionRule:
    """The rule for the last columns alone."""
    T, start, stop = q.shape[2], entries.start, entries.start + entries.near.k.shape[2]
    if start == 0:
        return rule
    tile = Tile(T, stop, range(T), range(start, stop), q.device)
    visible = None if rule.visible is None else as_mask(_gathered(rule.visible, [(tile, None)]))
    bias = None if rule.bias is None else TensorBias(_gathered(rule.bias, [(tile, None)]))
    return replace(rule, visible=visible, bias=bias)


def attend_streaming(
    q: Float[Tensor, "B H T D"],
    entries: Entries,
    rule: AttentionRule,
    kept: tuple[int, int],
    n_columns: int,
    first: Int[Tensor, " B"] | None,
) -> Float[Tensor, "B H T Dv"]:
    """The heads of queries that see the first tokens of each text and the latest.

    Queries are computed in blocks, each on the keys of its windows and the first tokens alone: the
    work grows with the window, not with the text.

    Args:
        rule: What the model itself hides besides, over all columns.
        kept: How many of the first tokens are seen, and how many of the latest.
        n_columns: The number of columns up to the last query.
        first: The column of the first token of each text; None if no row is padded.
    """
    (sinks, window), T, device = kept, q.shape[2], q.device
    rows, parts = max(_ROWS, window // 2), []
    is_causal = isinstance(rule.visible, Window) and rule.visible == Window(None, 0)
    for row in range(0, T, rows):
        block = range(row, min(row + rows, T))
        start = max(entries.start, n_columns - T + block.start - window + 1)
        stop = n_columns - T + block.stop
        keys = entries.near.slice(start - entries.start, stop - entries.start)
        columns = torch.arange(start, stop, device=device)[None]
        # For each part of the keys its tile, and which keys of the tile they are; None: all.
        tiles: list[tuple[Tile, Tensor | None]] = [
            (Tile(T, n_columns, block, range(start, stop), device), None)
        ]
        if entries.far is not None and entries.columns is not None and sinks and start > 0:
            far = entries.columns.masked_fill(entries.columns >= start, -1)  # the others are near
            tile = Tile(T, n_columns, block, range(max(1, int(far.max()) + 1)), device)
            tiles.insert(0, (tile, far.clamp(min=0)))
            columns = torch.cat((far, columns.expand(len(far), -1)), 1)
            keys = entries.far.followed_by(keys)
        at = columns[:, None, None]  # b 1 1 n
        position = at - _starts(first, device)[:, :, None, None]
        query = n_columns - T + torch.arange(block.start, block.stop, device=device)[:, None]
        is_sink = (position >= 0) & (position < sinks)
        visible = (at >= 0) & (at <= query) & (is_sink | (query - at < window))
        if rule.visible is not None and not is_causal:
            visible = visible & _gathered(rule.visible, tiles)
        bias = None if rule.bias is None else TensorBias(_gathered(rule.bias, tiles))
        of_block = replace(rule, visible=as_mask(visible), bias=bias)
        parts.append(attend_with(q[:, :, block.start : block.stop], keys, of_block))
    return torch.cat(parts, 2)


def _gathered(x: Mask | Bias, tiles: list[tuple[Tile, Tensor | None]]) -> Tensor:
    """The entries of a mask or bias for the keys of these tiles."""
    parts = []
    for tile, columns in tiles:
        part = x.tile(tile)
        if part.shape[3] == 1:  # the same for all keys
            n = tile.keys.stop - tile.keys.start if columns is None else columns.shape[1]
            part = part.expand(-1, -1, -1, n)
        elif columns is not None:
            B = max(len(part), len(columns))
            index = columns[:, None, None].expand(B, *part.shape[1:3], -1)
            part = part.expand(B, -1, -1, -1).gather(3, index)
        parts.append(part)
    shape = [max(sizes) for sizes in zip(*(x.shape[:3] for x in parts), strict=True)]
    return torch.cat([x.expand(*shape, x.shape[3]) for x in parts], 3)


def _starts(first: Tensor | None, device: torch.device) -> Int[Tensor, "_ 1"]:
    """The column of the first token of each text."""
    if first is None:
        return torch.zeros(1, 1, dtype=torch.long, device=device)
    return first.to(device)[:, None]
