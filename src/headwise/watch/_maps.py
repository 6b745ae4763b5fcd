"""The last batch: exact attention maps of chosen heads."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.capture import AttentionCall, Site
from headwise.errors import ArgumentError
from headwise.kernels import HeadBlock, weights_in_blocks, weights_of_head
from headwise.masks.tiles import Tile
from headwise.ownership import OutputProjection
from headwise.tables import Head
from headwise.watch._sums import projected_norms

Queries = slice | SupportsIndex | Sequence[SupportsIndex] | None
# The number of weights that are computed at a time.
_BLOCK = 1 << 22


class TopKeys(NamedTuple):
    """The keys that each query attends to most, in descending order."""

    keys: Int[Tensor, "B R k"]  # columns of the batch; −1 if there is no further key
    weights: Float[Tensor, "B R k"]


@dataclass(frozen=True)
class Layer:
    """The self-attention of one layer on the last batch.

    Attributes:
        heads: Its heads, in order.
        visible: Which keys each query may attend to; one mask for all heads if they share it.
    """

    heads: tuple[Head, ...]
    visible: Bool[Tensor, " B #H T S"]
    _call: AttentionCall
    _per_head: Float[Tensor, "H Dv d_model"] | None

    def blocks(self) -> Iterator[HeadBlock]:
        """The exact weights of all heads, a block of heads at a time, in memory that is reused."""
        return weights_in_blocks(self._call.q, self._call.k, self._call.rule)

    def value_norms(self) -> Float[Tensor, "B H S"] | None:
        """The norm of what each head would write for each key, `‖v_j W_O‖`.

        Values that are not finite are 0; None without an output projection.
        """
        if self._per_head is None:
            return None
        norms = projected_norms(self._call.v, self._per_head, torch.float32)
        return norms.nan_to_num(0.0, 0.0, 0.0)

    def written(self) -> Iterator[tuple[Head, Float[Tensor, "B S d_model"]]]:
        """What each head would write for each key, `v_j W_O`; nothing without a projection."""
        if self._per_head is not None:
            shared = len(self.heads) // self._call.v.shape[1]  # heads that read one value
            for index, head in enumerate(self.heads):
                yield head, self._call.v[:, index // shared] @ self._per_head[index]


def layer_of(site: Site, call: AttentionCall, projection: OutputProjection | None) -> Layer:
    """The self-attention of one layer, from its last call."""
    (B, _, T, _), S, device = call.q.shape, call.k.shape[2], call.q.device
    visible = call.rule.visible_in(Tile.whole(T, S, device))
    if visible is None:
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    per_head = None if projection is None else projection.per_head
    return Layer(site.heads(), visible.expand(B, -1, T, S), call, per_head)


def ranges_of(caller: str, queries: Queries, call: AttentionCall) -> list[range]:
    """The chosen columns of the queries of a call, in the order given, as ranges of neighbors.

    Raises:
        ArgumentError: a column does not exist, or the queries are no numbers.
    """
    T = call.q.shape[2]
    if queries is None or isinstance(queries, slice):
        columns: Sequence[Any] = range(T)[queries or slice(None)]
    else:
        numbers: Any = queries.tolist() if hasattr(queries, "tolist") else queries
        columns = list(numbers) if isinstance(numbers, Iterable) else [numbers]
    ranges: list[range] = []
    for column in columns:
        if not isinstance(column, Integral) or not -T <= int(column) < T:
            raise ArgumentError(
                f"{caller}: queries has {column!r}, where a layer has {T} queries. Give numbers "
                f"from {-T} to {T - 1}."
            )
        start = int(column) % T
        if ranges and ranges[-1].stop == start:
            ranges[-1] = range(ranges[-1].start, start + 1)
        else:
            ranges.append(range(start, start + 1))
    return ranges


def weights_of_heads(
    call: AttentionCall,
    heads: Sequence[int],
    rows: Sequence[range],
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "B h R S"]:
    """The weights of some heads for some queries; float32 for half precision, or another dtype."""
    dtype = dtype or torch.promote_types(call.q.dtype, torch.float32)
    shape = len(call.q), len(heads), sum(map(len, rows)), call.k.shape[2]
    weights = call.q.new_empty(shape, dtype=dtype)
    for place, head in enumerate(heads):
        start = 0
        for part in rows:
            for block in in_blocks(call, head, part):
                weights[:, place, start : start + block.shape[1]] = block
                start += block.shape[1]
    return weights


def in_blocks(call: AttentionCall, head: int, rows: range) -> Iterator[Float[Tensor, "B R S"]]:
    """The weights of a head, a block of rows at a time."""
    size = max(1, _BLOCK // max(1, len(call.k) * call.k.shape[2]))
    for start in range(rows.start, max(rows.stop, rows.start + 1), size):
        block = range(start, min(rows.stop, start + size))
        yield weights_of_head(call.q, call.k, call.rule, head, block)
