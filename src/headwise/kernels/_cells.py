"""The plane of weights, cut into cells that fit the cache: nothing larger is ever held.

A cell is some texts, some heads and some queries against all the keys they may see.
Exponentials are taken in base 2 (three times cheaper than base e); `LN2` leads back.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.kernels._rule import Rule
from headwise.masks import Tile

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
class Powers:
    """The softmax of one cell before its division: `2 ** (logits - peak)` and their total."""

    shifted: Float[Tensor, "b h R n"]  # logits - peak, in base 2
    powers: Float[Tensor, "b h R n"]
    kept: Float[Tensor, "b h R"]  # the sum of the powers
    total: Float[Tensor, "b h R"]  # and of the sink's
    peak: Float[Tensor, "b h R"]
    highest: Float[Tensor, "b h R"]  # of `shifted`: 0 unless a sink is the peak
    max_logit: Float[Tensor, "b h R"]  # in base 2, without bias; −inf for a row without keys
    visible: Bool[Tensor, "#b #h R n"] | None

    @property
    def divisor(self) -> Float[Tensor, "b h R 1"]:
        """The total, or 1 for a row without keys, whose weights are all zero anyway."""
        return torch.where(self.total == 0, 1.0, self.total).unsqueeze(-1)


def over_cells(q: Tensor, k: Tensor, rule: Rule, compute: Callable[[Cell], Named]) -> Named:
    """Join what `compute` says of each cell: tensors that begin with `b h R` become `B H T`."""
    B, H, T, _ = q.shape
    Hkv, S = k.shape[1], k.shape[2]
    if torch.compiler.is_exporting():  # a loop over a length that is open cannot be written down
        every = slice(None)
        return compute(Cell(every, every, every, Tile.whole(T, S, q.device)))
    texts, kv_heads, rows = _cell_size(B, Hkv, H // Hkv, T, S)

    def of_heads(at: slice, kv: slice) -> Named:
        heads = slice(kv.start * (H // Hkv), kv.stop * (H // Hkv))
        blocks = [range(start, min(T, start + rows)) for start in range(0, max(1, T), rows)]
        tiles = [Tile(T, S, block, rule.extent(block, T, S), q.device) for block in blocks]
        return _join(2, [compute(Cell(at, kv, heads, tile)) for tile in tiles])

    def of_texts(at: slice) -> Named:
        return _join(1, [of_heads(at, kv) for kv in _slices(Hkv, kv_heads)])

    return _join(0, [of_texts(at) for at in _slices(B, texts)])


def _slices(size: int, step: int) -> list[slice]:
    return [slice(start, min(size, start + step)) for start in range(0, max(1, size), step)]


def _cell_size(B: int, Hkv: int, G: int, T: int, S: int) -> tuple[int, int, int]:
    """How many texts, kv heads and rows go into a cell: rows first, then heads, then texts."""
    most = 256 if S <= 4096 else 128
    rows = max(1, min(T, most, CELL // max(1, S * G)))
    kv_heads = max(1, min(Hkv, CELL // max(1, S * G * rows)))
    texts = max(1, min(B, CELL // max(1, S * G * rows * Hkv))) if kv_heads == Hkv else 1
    return texts, kv_heads, rows


def _join(axis: int, parts: Sequence[Named]) -> Named:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts], dim=axis) for name in parts[0]}


def powers_of_cell(q: Tensor, k: Tensor, rule: Rule, cell: Cell) -> Powers:
    """The unnormalised softmax of one cell. Half precisions are computed in float32."""
    shifted = _base2_logits(q, k, rule, cell)
    visible = rule.visible_in(cell.tile, cell.texts, cell.heads)
    if visible is not None:
        # A mask that is the same for all queries or keys is counted for each of them.
        visible = visible.expand(-1, -1, *shifted.shape[2:])
        shifted = shifted.masked_fill_(~visible, HIDDEN)
    highest = _amax(shifted)
    biased = highest
    bias = rule.bias_in(cell.tile, cell.texts, cell.heads)
    if bias is not None:
        shifted = shifted + (bias * LOG2E).to(shifted.dtype)
        biased = _amax(shifted)
    peak, sinks = biased, None
    if rule.sinks is not None:
        sinks = (rule.sinks[cell.heads] * LOG2E).to(shifted.dtype)[None, :, None]
        peak = torch.maximum(peak, sinks.detach())
    peak = torch.where(peak < HIDDEN / 2, 0.0, peak)
    shifted = shifted.sub_(peak.unsqueeze(-1))
    powers = torch.exp2(shifted)
    kept = powers.sum(-1)
    total = kept if sinks is None else kept + torch.exp2(sinks - peak)
    max_logit = torch.where(highest < HIDDEN / 2, -math.inf, highest)
    return Powers(shifted, powers, kept, total, peak, biased - peak, max_logit, visible)


def _base2_logits(q: Tensor, k: Tensor, rule: Rule, cell: Cell) -> Float[Tensor, "b h R n"]:
    work = torch.promote_types(q.dtype, torch.float32)
    queries = q[cell.texts, cell.heads, cell.rows].to(work)
    keys = k[cell.texts, cell.kv_heads, cell.keys].to(work)
    b, h, R, _ = queries.shape
    factor = rule.scale if rule.softcap is not None else rule.scale * LOG2E
    # The heads of a group stand one below the other, so that their keys are read once.
    kv_heads, n = keys.shape[1], keys.shape[2]
    grouped = (queries * factor).reshape(b, kv_heads, h // kv_heads * R, queries.shape[-1])
    logits = torch.matmul(grouped, keys.transpose(-1, -2)).view(b, h, R, n)
    if rule.softcap is not None:
        logits = torch.tanh(logits / rule.softcap) * (rule.softcap * LOG2E)
    return logits


def _amax(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 0:  # no key is in sight of any of these rows
        return logits.new_full(logits.shape[:-1], HIDDEN)
    return logits.detach().amax(-1)


def mix(cell: Cell, weights: Tensor, v: Tensor) -> Float[Tensor, "b h R Dv"]:
    """Weights times values, the heads of a group against their one value head."""
    values = v[cell.texts, cell.kv_heads, cell.keys].to(weights.dtype)
    b, h, R, n = weights.shape
    kv_heads = values.shape[1]
    grouped = weights.reshape(b, kv_heads, h // kv_heads * R, n)
    return torch.matmul(grouped, values).view(b, h, R, values.shape[-1])
