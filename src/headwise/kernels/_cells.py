"""The plane of weights, cut into cells that fit the cache: nothing larger is ever held.

A cell is some texts, some heads and some queries against all the keys they may see.
Exponentials are taken in base 2 (three times cheaper than base e); `LN2` leads back.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.kernels._rule import Rule
from headwise.masks import Mask, Tile

LN2 = math.log(2.0)
LOG2E = 1.0 / LN2
# Far below any logit, and finite: 0 · HIDDEN is 0 where 0 · −inf would be NaN.
HIDDEN = -1e30
# Entries in one cell. Half a million floats stay in the cache of one core.
CELL = 1 << 19

Named = dict[str, Tensor]


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


@dataclass(frozen=True)
class Hidden:
    """What the rows of a cell may not attend to: nothing but some edges of its columns."""

    edges: tuple[tuple[slice, Bool[Tensor, "#b #h R _"]], ...]

    @classmethod
    def of(cls, rule: Rule, cell: Cell) -> "Hidden":
        if rule.visible is None:
            return cls(())
        edges = []
        for tile in _edges(rule.visible, cell.tile):
            visible = rule.visible_in(tile, cell.texts, cell.heads)
            if visible is not None:
                start, stop = tile.keys.start, tile.keys.stop
                # A mask that is the same for all queries or keys hides from each of them.
                rows = tile.rows.stop - tile.rows.start
                hidden = ~visible.expand(-1, -1, rows, stop - start)
                shift = cell.tile.keys.start
                edges.append((slice(start - shift, stop - shift), hidden))
        return cls(tuple(edges))

    def cover(self, logits: Float[Tensor, "b h R n"]) -> Tensor:
        for at, hidden in self.edges:
            whole = hidden.shape[-1] == logits.shape[-1]
            (logits if whole else logits[..., at]).masked_fill_(hidden, HIDDEN)
        return logits


def _edges(visible: Mask, tile: Tile) -> list[Tile]:
    """The parts of a tile left and right of the keys that all its queries may attend to."""
    rows, keys = tile.rows, tile.keys
    if isinstance(rows, slice) or isinstance(keys, slice):  # of a length that is open
        return [tile]
    shared = visible.shared(rows, tile.T, tile.S)
    start = min(max(shared.start, keys.start), keys.stop)
    stop = max(min(shared.stop, keys.stop), start)
    parts = range(keys.start, start), range(stop, keys.stop)
    return [replace(tile, keys=part) for part in parts if len(part)]


class Scratch:
    """Memory that one cell after another computes in: fresh memory takes time of its own."""

    def __init__(self) -> None:
        self._known: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Room for a tensor; what was in the room of that name is lost."""
        size = math.prod(shape)
        known = self._known.get(name)
        if known is None or known.numel() < size:
            known = self._known[name] = like.new_empty(size)
        return known[:size].view(*shape)


@dataclass(frozen=True)
class Powers:
    """The softmax of one cell before its division: `2 ** (logits - peak)` and their total."""

    shifted: Float[Tensor, "b h R n"]  # logits - peak, in base 2
    powers: Float[Tensor, "b h R n"]
    kept: Float[Tensor, "b h R"]  # the sum of the powers
    total: Float[Tensor, "b h R"]  # and of the sink's
    peak: Float[Tensor, "b h R"]
    highest: Float[Tensor, "b h R"]  # of `shifted`: 0 unless a sink is the peak
    max_logit: Float[Tensor, "b h R"]  # in base 2, without bias; HIDDEN for a row without keys
    hidden: Hidden

    @cached_property
    def divisor(self) -> Float[Tensor, "b h R 1"]:
        """The total, or 1 for a row without keys, whose weights are all zero anyway."""
        return positive(self.total).unsqueeze(-1)


def positive(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1.0, total)


def over_cells(q: Tensor, k: Tensor, rule: Rule, compute: Callable[[Cell], Named]) -> Named:
    """Join what `compute` says of each cell: tensors that begin with `b h R` become `B H T`."""
    B, H, T, _ = q.shape
    Hkv, S = k.shape[1], k.shape[2]
    if torch.compiler.is_exporting():  # a loop over a length that is open cannot be written down
        every = slice(None)
        return compute(Cell(every, every, every, Tile.whole(T, S, q.device)))
    texts, kv_heads, rows = _cell_size(B, Hkv, H // Hkv, T, S)

    def of_rows(at: slice, tile: Tile) -> Named:
        groups = [(kv, slice(kv.start * (H // Hkv), kv.stop * (H // Hkv))) for kv in all_heads]
        return _join(1, [compute(Cell(at, kv, heads, tile)) for kv, heads in groups])

    def of_texts(at: slice) -> Named:
        return _join(2, [of_rows(at, tile) for tile in tiles])

    all_heads = _slices(Hkv, kv_heads)
    blocks = [range(start, min(T, start + rows)) for start in range(0, max(1, T), rows)]
    tiles = [Tile(T, S, block, rule.extent(block, T, S), q.device) for block in blocks]
    return _join(0, [of_texts(at) for at in _slices(B, texts)])


def _slices(size: int, step: int) -> list[slice]:
    return [slice(start, min(size, start + step)) for start in range(0, max(1, size), step)]


def _cell_size(B: int, Hkv: int, G: int, T: int, S: int) -> tuple[int, int, int]:
    """How many texts, kv heads and rows go into a cell: rows first, then heads, then texts."""
    most = 256 if S <= 4096 else 128
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
    q: Tensor, k: Tensor, rule: Rule, cell: Cell, scratch: Scratch | None = None
) -> Powers:
    """The unnormalised softmax of one cell. Half precisions are computed in float32.

    With a scratch nothing may need a gradient, and what was computed in it before is lost.
    """
    hidden = Hidden.of(rule, cell)
    shifted = hidden.cover(_base2_logits(q, k, rule, cell, scratch))
    max_logit = highest = _amax(shifted)
    bias = rule.bias_in(cell.tile, cell.texts, cell.heads)
    if bias is not None:
        shifted = shifted + (bias * LOG2E).to(shifted.dtype)
        highest = _amax(shifted)
    peak, sinks = highest, None
    if rule.sinks is not None:
        sinks = (rule.sinks[cell.heads] * LOG2E).to(shifted.dtype)[None, :, None]
        peak = torch.maximum(peak, sinks.detach())
    if hidden.edges or shifted.shape[-1] == 0:
        peak = torch.where(peak < HIDDEN / 2, 0.0, peak)
    shifted = shifted.sub_(peak.unsqueeze(-1))
    room = None if scratch is None else scratch.take("powers", shifted, shifted.shape)
    powers = torch.exp2(shifted, out=room)
    kept = powers.sum(-1)
    total = kept if sinks is None else kept + torch.exp2(sinks - peak)
    return Powers(shifted, powers, kept, total, peak, highest - peak, max_logit, hidden)


def _base2_logits(
    q: Tensor, k: Tensor, rule: Rule, cell: Cell, scratch: Scratch | None
) -> Float[Tensor, "b h R n"]:
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
    # The heads of a group stand one below the other.
    below = rows.reshape(b * kv, h // kv * R, m)
    room = None if scratch is None else scratch.take(name, rows, (b * kv, h // kv * R, n))
    return torch.bmm(below, columns.reshape(b * kv, m, n), out=room).view(b, h, R, n)


def _amax(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 0:  # no key is in sight of any of these rows
        return logits.new_full(logits.shape[:-1], HIDDEN)
    return logits.detach().amax(-1)


def mix(
    cell: Cell, weights: Tensor, v: Tensor, scratch: Scratch | None = None
) -> Float[Tensor, "b h R Dv"]:
    """Weights times values, the heads of a group against their one value head."""
    values = v[cell.texts, cell.kv_heads, cell.keys].to(weights.dtype)
    return grouped_product(weights, values, scratch, "mixed")
