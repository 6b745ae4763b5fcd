"""A cell of the plane of weights, its mask, and the precision of its logits."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.kernels.spec import AttentionRule, Named
from headwise.masks import Mask
from headwise.masks.tiles import Tile

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
    _ceilings: list[Tensor] | None = None

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
            _part(logits, columns, hidden).masked_fill_(hidden, value)
        return logits

    def apply_ceilings(self, logits: Float[Tensor, "b h R n"]) -> Tensor:
        """The same as `fill`, and faster on a CPU; but masked logits that are NaN stay."""
        if self._ceilings is None:
            high = logits.new_tensor(math.inf)
            low = hidden_logit(logits)
            self._ceilings = [torch.where(hidden, low, high) for _, hidden in self.edges]
        for (columns, hidden), ceiling in zip(self.edges, self._ceilings, strict=True):
            part = _part(logits, columns, hidden)
            torch.minimum(part, ceiling, out=part)
        return logits


def hidden_logit(logits: Tensor) -> float:
    """The logit of a masked key, in the precision of these logits."""
    return _HIDDEN[logits.dtype]


def is_without_keys(highest: Float[Tensor, "b h R"]) -> Bool[Tensor, "b h R"]:
    """Whether the largest logit of a row is that of a masked key: the row sees no other."""
    return highest < hidden_logit(highest) / 2


def _part(logits: Tensor, columns: slice, hidden: Tensor) -> Tensor:
    return logits if hidden.shape[-1] == logits.shape[-1] else logits[..., columns]


def _edges(visible: Mask, tile: Tile) -> list[Tile]:
    """The parts of a tile left and right of the keys that are visible to all its queries."""
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
