"""A close look at the last batch: the exact weights of chosen heads, and what keys received."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.kernels import HeadBlock, weights_in_blocks, weights_of_head
from headwise.masks.tiles import Tile
from headwise.models import AttentionCall, Site, output_projection
from headwise.tables import Head, HeadLike, resolve_heads
from headwise.watch._positions import NONE
from headwise.watch._row_sums import norms_behind

Rows = range | slice | None
# Weights that are made at once, where only some of them are kept.
_BLOCK = 1 << 22


class TopKeys(NamedTuple):
    """The keys that each query attends to most, from the most on."""

    keys: Int[Tensor, "B R k"]  # columns of the batch; −1 where there is no further key
    weights: Float[Tensor, "B R k"]


@dataclass(frozen=True)
class Layer:
    """What a layer does with its own text on the last batch.

    Attributes:
        heads: Its heads, in order.
        visible: What each query may attend to, once for all heads where they don't differ.
    """

    heads: tuple[Head, ...]
    visible: Bool[Tensor, "B #H T S"]
    _call: AttentionCall
    _per_head: Float[Tensor, "H Dv d_model"] | None

    def blocks(self) -> Iterator[HeadBlock]:
        """The exact weights of all heads, some heads at a time, in memory that is used again."""
        return weights_in_blocks(self._call.q, self._call.k, self._call.rule)

    def value_norms(self) -> Float[Tensor, "B H S"] | None:
        """How much each head would write of each key, `‖v_j W_O‖`; None: no output projection.

        What is not finite is 0.
        """
        if self._per_head is None:
            return None
        norms = norms_behind(self._call.v, self._per_head, torch.float32)
        return norms.nan_to_num(0.0, 0.0, 0.0)


class Maps:
    """The last call of every site, and what its keys have received since their texts began."""

    def __init__(self, maps: bool, received: bool) -> None:
        self._maps, self._receives = maps, received
        self._last: dict[Site, AttentionCall] = {}
        self._received: dict[Site, tuple[int, Float[Tensor, "B H S"]]] = {}

    def take(self, site: Site, call: AttentionCall, text: int, received: Tensor | None) -> None:
        """Remember a call; `text` is the number of its first text."""
        if self._maps:
            self._last[site] = call
        if received is None:
            return
        before, sums = self._received.get(site, (-1, received))
        if before == text and sums.shape[2] <= received.shape[2]:
            # A cache only grows: what is new has received nothing yet.
            more = received.shape[2] - sums.shape[2]
            received = received + torch.nn.functional.pad(sums, (0, more))
        self._received[site] = text, received

    def layers(self, model: nn.Module) -> list[Layer]:
        if not self._maps:
            raise ArgumentError("Watch.layers: maps=False. Observe with Request(maps=True).")
        order = sorted(self._last, key=lambda site: (site.stack, site.layer))
        return [self._layer(model, site) for site in order if not site.cross]

    def _layer(self, model: nn.Module, site: Site) -> Layer:
        call, projection = self._last[site], output_projection(model, site)
        B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        seen = call.rule.visible_in(Tile.whole(T, S, call.q.device))
        if seen is None:
            seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.q.device)
        visible = seen.expand(B, -1, T, S)
        per_head = None if projection is None else projection.per_head
        return Layer(site.heads(), visible, call, per_head)

    def received(self, head: HeadLike) -> Float[Tensor, "B S"]:
        if not self._receives:
            raise ArgumentError(
                "Watch.received: received=False. Observe with Request(received=True)."
            )
        site, at = _find(head, self._received)
        return self._received[site][1][:, at]

    @torch.no_grad()
    def weights(self, head: HeadLike, rows: Rows) -> Float[Tensor, "B R S"]:
        call, at, chosen = self._look("weights", head, rows)
        return torch.cat(list(_in_blocks(call, at, chosen)), 1)

    def visible(self, head: HeadLike) -> Bool[Tensor, "B T S"]:
        call, at, rows = self._look("visible", head, None)
        B, S, device = call.k.shape[0], call.k.shape[2], call.q.device
        tile = Tile.whole(len(rows), S, device)
        seen = call.rule.visible_in(tile, heads=slice(at, at + 1))
        if seen is None:
            seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return seen.expand(B, -1, len(rows), S)[:, 0]

    @torch.no_grad()
    def top_keys(self, head: HeadLike, k: int, rows: Rows) -> TopKeys:
        call, at, chosen = self._look("top_keys", head, rows)
        S = call.k.shape[2]
        if not 1 <= k <= S:
            raise ArgumentError(f"Watch.top_keys: k={k} among {S} keys. Give 1 to {S}.")
        found = [weights.topk(k, dim=-1) for weights in _in_blocks(call, at, chosen)]
        weights = torch.cat([one.values for one in found], 1)
        keys = torch.cat([one.indices for one in found], 1)
        return TopKeys(keys.masked_fill(weights == 0, NONE), weights)

    def _look(self, what: str, head: HeadLike, rows: Rows) -> tuple[AttentionCall, int, range]:
        if not self._maps:
            raise ArgumentError(f"Watch.{what}: maps=False. Observe with Request(maps=True).")
        site, at = _find(head, self._last)
        call = self._last[site]
        T = call.q.shape[2]
        chosen = range(T) if rows is None else rows
        if isinstance(chosen, slice):
            chosen = range(*chosen.indices(T))
        if not isinstance(chosen, range) or chosen.step != 1:
            raise ArgumentError(f"Watch.{what}: rows={rows!r}. Give a slice or range of step 1.")
        if not (0 <= chosen.start <= chosen.stop <= T):
            raise ArgumentError(f"Watch.{what}: {rows} in a text of {T}. Stay within it.")
        return call, at, chosen


def _find(head: HeadLike, sites: Iterable[Site]) -> tuple[Site, int]:
    known = {one: site for site in sites for one in site.heads()}
    address, *others = resolve_heads(head, known)
    if others:
        raise ArgumentError(f"Watch: {head} are several heads. Ask for one at a time.")
    return known[address], address.head


def _in_blocks(call: AttentionCall, head: int, rows: range) -> Iterator[Float[Tensor, "B R S"]]:
    """The weights of a head, some rows at a time."""
    size = max(1, _BLOCK // max(1, len(call.k) * call.k.shape[2]))
    for start in range(rows.start, max(rows.stop, rows.start + 1), size):
        block = range(start, min(rows.stop, start + size))
        yield weights_of_head(call.q, call.k, call.rule, head, block)
