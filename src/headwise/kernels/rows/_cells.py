"""The plane of weights, cut into cells that fit the cache: nothing larger is ever stored.

A cell is some texts, some heads and some queries against all the keys they may see.
Exponentials are in base 2, which is cheaper than base e; `LN2` converts back.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise._torch_private import mapped_with
from headwise.kernels._contract import Named
from headwise.kernels._rule import AttentionRule
from headwise.masks import Mask
from headwise.masks.tiles import Tile

LN2 = math.log(2.0)
LOG2E = 1.0 / LN2
# Entries in one cell. Half a million floats stay in the cache of one core.
CELL = 1 << 19
# The logit of a masked key, far below any other, and finite: 0 · HIDDEN is 0, 0 · −inf is NaN.
# In float64 differences of two such logits are finite, too.
_HIDDEN = {torch.float32: -1e30, torch.float64: -(2.0**1022)}


@dataclass(frozen=True)
class Cell:
    """Slices of a batch: texts, kv heads, the query heads that read them, and a tile."""

    texts: slice
    kv_heads: slice
    heads: slice
    tile: Tile

    @property
    def rows(self) -> slice:
        return slice(self.tile.rows.start, self.tile.rows.stop)

    @property
    def keys(self) -> slice:
        return slice(self.tile.keys.start, self.tile.keys.stop)


@dataclass
class Hidden:
    """What is masked in a cell: parts of it at its left and right edge."""

    edges: tuple[tuple[slice, Bool[Tensor, "#b #h R _"]], ...]

    @classmethod
    def of(cls, rule: AttentionRule, cell: Cell) -> "Hidden":
        if rule.visible is None:
            return cls(())
        edges = []
        for tile in _edges(rule.visible, cell.tile):
            visible = rule.visible_in(tile, cell.texts, cell.heads)
            if visible is not None:
                start, stop = tile.keys.start, tile.keys.stop
                # A mask that is the same for all queries or keys is expanded to them.
                rows = tile.rows.stop - tile.rows.start
                hidden = ~visible.expand(-1, -1, rows, stop - start)
                shift = cell.tile.keys.start
                edges.append((slice(start - shift, stop - shift), hidden))
        return cls(tuple(edges))

    @cached_property
    def number(self) -> Int[Tensor, "#b #h R"] | int:
        """The number of masked keys of each row."""
        return sum(hidden.sum(-1) for _, hidden in self.edges)

    def fill(self, logits: Float[Tensor, "b h R n"], value: float | None = None) -> Tensor:
        value = hidden_logit(logits) if value is None else value
        for columns, hidden in self.edges:
            # An exported program may not cut an axis at a dynamic length.
            is_whole = hidden.shape[-1] == logits.shape[-1]
            (logits if is_whole else logits[..., columns]).masked_fill_(hidden, value)
        return logits


def hidden_logit(logits: Tensor) -> float:
    """The logit of a masked key, in the precision of these logits."""
    return _HIDDEN[logits.dtype]


def is_without_keys(highest: Float[Tensor, "b h R"]) -> Bool[Tensor, "b h R"]:
    """Whether the largest logit of a row is that of a masked key: the row sees no other."""
    return highest < hidden_logit(highest) / 2


def _edges(visible: Mask, tile: Tile) -> list[Tile]:
    """The parts of a tile left and right of the keys that are visible to all its queries.

    Masking these alone, 12 causal heads on 2,048 keys take 1.5 s in place of 2.0.
    """
    rows, keys = tile.rows, tile.keys
    if isinstance(rows, slice) or isinstance(keys, slice):  # of a dynamic length
        return [tile]
    shared = visible.shared(rows, tile.T, tile.S)
    start = min(max(shared.start, keys.start), keys.stop)
    stop = max(min(shared.stop, keys.stop), start)
    parts = range(keys.start, start), range(stop, keys.stop)
    return [replace(tile, keys=part) for part in parts if len(part)]


def in_double(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S Dv"]]:
    """Queries, keys and values in float64 where the logits of the rule need it."""
    return (q.double(), k.double(), v.double()) if rule.needs_double else (q, k, v)


def restore_dtype(named: Named, dtype: torch.dtype, rule: AttentionRule) -> Named:
    """Results in the precision promised for queries of a dtype, if `in_double` has changed it."""
    if not rule.needs_double:
        return named
    work = torch.promote_types(dtype, torch.float32)
    return {name: x.to(work) if x.is_floating_point() else x for name, x in named.items()}


class _Buffers(threading.local):
    """Memory of each thread, kept between calls, since new pages cost more than computing in them:
    statistics of 12 heads on 2,048 keys, causal, take 195 ms in place of 281.
    """

    def __init__(self) -> None:
        self.known: dict[object, Tensor] = {}


_buffers = _Buffers()


class Scratch:
    """What cells take over from the one before: memory to compute in, and the mask."""

    def __init__(self) -> None:
        self._large: dict[object, Tensor] = {}
        self._hidden: tuple[object, Hidden] | None = None

    def take(self, name: str, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Memory for a tensor; it overwrites the last tensor of that name."""
        size = math.prod(shape)
        plain = type(like) is Tensor and like.device.type == "cpu"
        # Only small buffers outlive the call.
        buffers = _buffers.known if plain and size <= CELL else self._large
        key = (name, like.dtype, like.device)
        known = buffers.get(key)
        if known is None or known.numel() < size:
            with torch.inference_mode(False):  # so that it may be written to in either mode
                known = torch.empty(size, dtype=like.dtype, device=like.device)
            buffers[key] = known
        return known[:size].view(*shape)

    def hidden(self, rule: AttentionRule, cell: Cell) -> Hidden:
        """The mask of a cell; consecutive cells have the same tile, and mostly share it.

        Statistics of 12 heads on 2,048 keys, causal, take 420 ms in place of 540.
        """
        texts, heads = (1, 1) if rule.visible is None else rule.visible.batch
        key = (cell.tile, texts > 1 and str(cell.texts), heads > 1 and str(cell.heads))
        if self._hidden is None or self._hidden[0] != key:
            self._hidden = key, Hidden.of(rule, cell)
        return self._hidden[1]


@dataclass(frozen=True)
class Powers:
    """The softmax of one cell before its division: `2 ** (logits - peak)` and their total."""

    shifted: Float[Tensor, "b h R n"]  # logits - peak, in base 2
    powers: Float[Tensor, "b h R n"]
    kept: Float[Tensor, "b h R"]  # the sum of the powers
    total: Float[Tensor, "b h R"]  # and of the sink's
    peak: Float[Tensor, "b h R"]
    highest: Float[Tensor, "b h R"]  # of `shifted`: 0 unless a sink is the peak
    max_logit: Float[Tensor, "b h R"]  # in base 2, without bias; hidden where no key is seen
    hidden: Hidden
    divisor: Float[Tensor, "b h R 1"]  # the total, or 1 for a row without keys: weights all zero


def positive(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1.0, total)


def over_cells(
    q: Tensor,
    k: Tensor,
    rule: AttentionRule,
    compute: Callable[[Cell], Named],
    rows: range | None = None,
) -> Named:
    """Join the results of `compute` for all cells: leading axes `b h R` become `B H T`.

    Args:
        rows: The queries, if not all of them.
    """
    B, H, T, _ = q.shape
    Hkv, S = k.shape[1], k.shape[2]
    if torch.compiler.is_exporting():  # a loop over a dynamic length cannot be exported
        every = slice(None)
        return compute(Cell(every, every, every, Tile.whole(T, S, q.device)))
    queries = range(T) if rows is None else rows
    skips = T > 0 and len(rule.extent(range(1), T, S)) < S
    G = H // Hkv
    n_texts, n_kv_heads, n_rows = _cell_size(B, Hkv, G, len(queries), S, skips)
    of_texts = []
    for texts in _slices(B, n_texts):
        of_rows = []
        for start in range(queries.start, max(queries.start + 1, queries.stop), n_rows):
            block = range(start, min(queries.stop, start + n_rows))
            tile = Tile(T, S, block, rule.extent(block, T, S), q.device)
            cells = [
                Cell(texts, kv, slice(kv.start * G, kv.stop * G), tile)
                for kv in _slices(Hkv, n_kv_heads)
            ]
            of_rows.append(_join(1, [compute(cell) for cell in cells]))
        of_texts.append(_join(2, of_rows))
    return _join(0, of_texts)


def _slices(size: int, step: int) -> list[slice]:
    return [slice(start, min(size, start + step)) for start in range(0, max(1, size), step)]


def _cell_size(B: int, Hkv: int, G: int, T: int, S: int, skips: bool) -> tuple[int, int, int]:
    """How many texts, kv heads and rows a cell has: rows first, then heads, then texts."""
    most = 256 if S <= 4096 else 128
    if skips and T > 256:  # the fewer rows in a block, the more keys are masked for all of them
        most = min(most, max(64, T // 8))
    rows = max(1, min(T, most, CELL // max(1, S * G)))
    kv_heads = max(1, min(Hkv, CELL // max(1, S * G * rows)))
    # Several texts are copied into a row before they are multiplied: small ones only.
    texts = max(1, min(B, CELL // max(1, 4 * S * G * rows * Hkv))) if kv_heads == Hkv else 1
    return texts, kv_heads, rows


def _join(axis: int, parts: Sequence[Named]) -> Named:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts], dim=axis) for name in parts[0]}


def powers_of_cell(
    q: Tensor, k: Tensor, rule: AttentionRule, cell: Cell, scratch: Scratch | None = None
) -> Powers:
    """The unnormalized softmax of one cell. Half precisions are computed in float32.

    With a scratch nothing may need a gradient, and what was computed in it before is lost.
    """
    hidden = Hidden.of(rule, cell) if scratch is None else scratch.hidden(rule, cell)
    logits = base2_logits(q, k, rule, cell, scratch)
    if scratch is None:
        others = [part for _, part in hidden.edges]
        logits = mapped_with(logits, others if rule.sinks is None else [*others, rule.sinks])
    shifted = hidden.fill(logits)
    highest = max_logit = _amax(shifted)
    bias = rule.bias_in(cell.tile, cell.texts, cell.heads)
    if bias is not None:
        shifted = shifted + (bias * LOG2E).to(shifted.dtype)
        highest = _amax(shifted)
    peak, sinks = highest, None
    if rule.sinks is not None:
        by_head = rule.sinks if rule.sinks.ndim == 3 else rule.sinks[None, :, None]
        of_cell = by_head[:, cell.heads]  # b h R, or 1 h 1
        if rule.sinks.ndim == 3:
            of_cell = of_cell[cell.texts, :, cell.rows]
        sinks = (of_cell * LOG2E).to(shifted.dtype)
        peak = torch.maximum(peak, sinks.detach())
    if hidden.edges or shifted.shape[-1] == 0:
        peak = torch.where(is_without_keys(peak), 0.0, peak)
    shifted = shifted.sub_(peak.unsqueeze(-1))
    buffer = None if scratch is None else scratch.take("powers", shifted, shifted.shape)
    powers = torch.exp2(shifted, out=buffer)
    kept = powers.sum(-1)
    total = kept if sinks is None else kept + torch.exp2(sinks - peak)
    divisor = positive(total).unsqueeze(-1)
    return Powers(shifted, powers, kept, total, peak, highest - peak, max_logit, hidden, divisor)


def base2_logits(
    q: Tensor, k: Tensor, rule: AttentionRule, cell: Cell, scratch: Scratch | None
) -> Float[Tensor, "b h R n"]:
    """The logits of one cell in base 2, without bias and mask."""
    work = torch.promote_types(q.dtype, torch.float32)
    queries = q[cell.texts, cell.heads, cell.rows].to(work)
    keys = k[cell.texts, cell.kv_heads, cell.keys].to(work)
    factor = rule.scale if rule.softcap is not None else rule.scale * LOG2E
    logits = grouped_product(queries * factor, keys.transpose(-1, -2), scratch, "logits")
    if rule.softcap is not None:
        logits = torch.tanh(logits / rule.softcap) * (rule.softcap * LOG2E)
    return logits


def grouped_product(
    rows: Float[Tensor, "b h R m"],
    columns: Float[Tensor, "b kv m n"],
    scratch: Scratch | None = None,
    name: str = "",
) -> Float[Tensor, "b h R n"]:
    """A matrix product for each head, whose kv head is read once for all heads of its group."""
    b, h, R, m = rows.shape
    kv, n = columns.shape[1], columns.shape[3]
    # The heads of a group are stacked as rows.
    below = rows.reshape(b * kv, h // kv * R, m)
    buffer = None if scratch is None else scratch.take(name, rows, (b * kv, h // kv * R, n))
    return torch.bmm(below, columns.reshape(b * kv, m, n), out=buffer).view(b, h, R, n)


def _amax(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 0:  # no key is visible to any of these rows
        return logits.new_full(logits.shape[:-1], hidden_logit(logits))
    return logits.detach().amax(-1)


def mix(
    cell: Cell, weights: Tensor, v: Tensor, scratch: Scratch | None = None
) -> Float[Tensor, "b h R Dv"]:
    """Weights times values, the heads of a group against their one value head."""
    values = v[cell.texts, cell.kv_heads, cell.keys].to(weights.dtype)
    return grouped_product(weights, values, scratch, "mixed")
