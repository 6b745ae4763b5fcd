"""The last batch: exact attention maps of chosen heads, and the attention each key received."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headwise.errors import ArgumentError, HeadError
from headwise.kernels import HeadBlock, weights_in_blocks, weights_of_head
from headwise.masks.tiles import Tile
from headwise.models import AttentionCall, Site
from headwise.models.ownership import output_projection
from headwise.tables import Head, HeadLike, resolve_heads
from headwise.watch._row_sums import projected_norms
from headwise.watch.layout import NONE

Rows = range | slice | None
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


class Maps:
    """The last call of every site, and the attention its keys received since their texts began."""

    def __init__(self, maps: bool, received: bool) -> None:
        self._keeps_maps, self._keeps_received = maps, received
        self._calls: dict[Site, AttentionCall] = {}
        self._received: dict[Site, tuple[int, Float[Tensor, "B H S"]]] = {}

    def record(
        self, site: Site, call: AttentionCall, first_text: int, received: Tensor | None
    ) -> None:
        """Keep a call and add what its keys received."""
        if self._keeps_maps:
            self._calls[site] = call
        if received is None:
            return
        previous_text, sums = self._received.get(site, (-1, received))
        if previous_text == first_text and sums.shape[2] <= received.shape[2]:
            # A cache only grows: new keys have received nothing yet.
            new_keys = received.shape[2] - sums.shape[2]
            received = received + torch.nn.functional.pad(sums, (0, new_keys))
        self._received[site] = first_text, received

    def copy(self) -> "Maps":
        """The same maps, to go back to."""
        same = Maps(self._keeps_maps, self._keeps_received)
        same._calls, same._received = dict(self._calls), dict(self._received)
        return same

    def all(self) -> dict[Site, AttentionCall]:
        if not self._keeps_maps:
            raise ArgumentError("Watch.calls: maps=False. Observe with Request(maps=True).")
        return dict(self._calls)

    def layers(self, model: nn.Module) -> list[Layer]:
        if not self._keeps_maps:
            raise ArgumentError("Watch.layers: maps=False. Observe with Request(maps=True).")
        order = sorted(self._calls, key=lambda site: (site.stack, site.layer))
        return [self._layer(model, site) for site in order if not site.cross]

    def _layer(self, model: nn.Module, site: Site) -> Layer:
        call, projection = self._calls[site], output_projection(model, site)
        B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        visible = _visible(call, Tile.whole(T, S, call.q.device)).expand(B, -1, T, S)
        per_head = None if projection is None else projection.per_head
        return Layer(site.heads(), visible, call, per_head)

    def received(self, head: HeadLike) -> Float[Tensor, "B S"]:
        if not self._keeps_received:
            raise ArgumentError(
                "Watch.received: received=False. Observe with Request(received=True)."
            )
        site, index = _find(head, self._received)
        return self._received[site][1][:, index]

    @torch.no_grad()
    def weights(self, head: HeadLike, rows: Rows) -> Float[Tensor, "B *H R S"]:
        layers = {str(site.heads()[0]).rpartition(".")[0]: site for site in self._calls}
        layer = layers.get(head) if isinstance(head, str) else None
        if layers and not layer and isinstance(head, str) and "H" not in head:
            first, *_, last = [*layers, *layers]
            raise HeadError(
                f"Watch.weights: {head!r} is neither a head nor a layer that is watched. Write "
                f"'{first}.H0', or a layer from {first} to {last}."
            )
        call, index, queries = self._select("weights", layer.heads()[0] if layer else head, rows)
        heads = range(layer.n_heads) if layer else [index]
        weights = weights_of_heads(call, heads, [queries])
        return weights if layer else weights[:, 0]

    def visible(self, head: HeadLike) -> Bool[Tensor, "B T S"]:
        call, index, queries = self._select("visible", head, None)
        B, S = call.k.shape[0], call.k.shape[2]
        tile = Tile.whole(len(queries), S, call.q.device)
        visible = _visible(call, tile, slice(index, index + 1))
        return visible.expand(B, -1, len(queries), S)[:, 0]

    @torch.no_grad()
    def top_keys(self, head: HeadLike, k: int, rows: Rows) -> TopKeys:
        call, index, queries = self._select("top_keys", head, rows)
        S = call.k.shape[2]
        if not 1 <= k <= S:
            raise ArgumentError(f"Watch.top_keys: k={k} among {S} keys. Give 1 to {S}.")
        blocks = [weights.topk(k, dim=-1) for weights in _in_blocks(call, index, queries)]
        weights = torch.cat([block.values for block in blocks], 1)
        keys = torch.cat([block.indices for block in blocks], 1)
        return TopKeys(keys.masked_fill(weights == 0, NONE), weights)

    def _select(self, method: str, head: HeadLike, rows: Rows) -> tuple[AttentionCall, int, range]:
        if not self._keeps_maps:
            raise ArgumentError(f"Watch.{method}: maps=False. Observe with Request(maps=True).")
        site, index = _find(head, self._calls)
        call = self._calls[site]
        T = call.q.shape[2]
        queries = range(T) if rows is None else rows
        if isinstance(queries, slice):
            queries = range(*queries.indices(T))
        if not isinstance(queries, range) or queries.step != 1:
            raise ArgumentError(f"Watch.{method}: rows={rows!r}. Give a slice or range of step 1.")
        if not (0 <= queries.start <= queries.stop <= T):
            raise ArgumentError(f"Watch.{method}: {rows} in a text of {T}. Stay within it.")
        return call, index, queries


def _find(head: HeadLike, sites: Iterable[Site]) -> tuple[Site, int]:
    known = {address: site for site in sites for address in site.heads()}
    address, *more = resolve_heads(head, known)
    if more:
        raise ArgumentError(f"Watch: {head} are several heads. Give one head at a time.")
    return known[address], address.head - known[address].first_head


def _visible(call: AttentionCall, tile: Tile, heads: slice = slice(None)) -> Bool[Tensor, "..."]:
    """Which keys each query of a tile may attend to, in a shape that expands to the tile."""
    visible = call.rule.visible_in(tile, heads=heads)
    if visible is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.q.device)
    return visible


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
            for block in _in_blocks(call, head, part):
                weights[:, place, start : start + block.shape[1]] = block
                start += block.shape[1]
    return weights


def _in_blocks(call: AttentionCall, head: int, rows: range) -> Iterator[Float[Tensor, "B R S"]]:
    """The weights of a head, a block of rows at a time."""
    size = max(1, _BLOCK // max(1, len(call.k) * call.k.shape[2]))
    for start in range(rows.start, max(rows.stop, rows.start + 1), size):
        block = range(start, min(rows.stop, start + size))
        yield weights_of_head(call.q, call.k, call.rule, head, block)
