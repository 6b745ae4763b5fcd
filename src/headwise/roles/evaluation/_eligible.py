"""The eligible pairs under a mask, and what attention weights score on them.

The entries of one cell are contiguous and in the order of the cells, and heads come last, so a sum
is one pass over contiguous rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag

from headwise.kernels import HeadBlock
from headwise.roles.evaluation._relation_index import TIE, RelationIndex, TokenPairs
from headwise.roles.relations import Item

# A share of the attention of a query: if less than this is left for keys that are not sinks, the
# evenness over them is 0.
_LEAST_LEFT = 1e-3


@dataclass(frozen=True)
class Segments:
    """Weighted rows of a table, grouped into cells.

    Attributes:
        rows: The numbers of the rows.
        starts: Where each cell begins.
        weights: The weight of each row; `hv` is 1, or there is one for each head of a layer.
    """

    rows: Int[Tensor, " K"]
    starts: Int[Tensor, " cells"]
    weights: Float[Tensor, "K hv"]

    def sums(self, table: Float[Tensor, "N h"], heads: slice) -> Float[Tensor, "cells h"]:
        """The weighted sum of the rows of each cell, for some heads of a layer."""
        rows, weights = self.rows, self.weights.to(table)
        if weights.shape[1] == 1:
            return embedding_bag(
                rows, table, self.starts, mode="sum", per_sample_weights=weights[:, 0].contiguous()
            )
        weighted = table.index_select(0, rows) * weights[:, heads]
        order = torch.arange(len(rows), device=rows.device)
        return embedding_bag(order, weighted, self.starts, mode="sum")


class EligiblePairs:
    """The pairs of a relation index that count under a mask, computed once for all its layers.

    A query is eligible if the mask allows one of its keys and leaves it a choice of keys. For a
    role scored by `top` the key must be a candidate as well.

    Attributes:
        candidates: Which units may hold the largest weight of each query.
        eligible: Which queries count, as 1 or 0.
        count: How many queries of each cell count.
        chance: What even attention scores in each cell.
    """

    def __init__(self, index: RelationIndex, visible: Bool[Tensor, "B hv T S"]) -> None:
        self.index, self._device = index, visible.device
        self._visible = visible.cpu()
        units = index.units.fold(self._visible.float()) > 0
        self.candidates = units & ~index.units.excluded[:, None]
        self._n_candidates = self.candidates.sum(-1)  # B hv n
        text, unit, query = index.text, index.unit, index.query
        self._top, self._choice = index.scored_by("top"), index.scored_by("choice")
        self._breadth = index.scored_by("entropy") | index.scored_by("content entropy")
        pair = (text[query], slice(None), unit[query], index.key)
        self._allowed = torch.where(self._top[query, None], self.candidates[pair], units[pair])
        has_key = _sum_into(self._allowed.float(), query, len(text)) > 0
        options = torch.where(
            self._top[:, None],
            self._n_candidates[text, :, unit],
            units.sum(-1)[text, :, unit],
        )
        self.choosable = index.choices.allowed(self.candidates)  # C hv
        decides = _sum_into(self.choosable.float(), index.choices.query, len(text)) > 0
        self.eligible = torch.where(
            self._choice[:, None], decides, has_key & (options > 1)
        ).float()  # Q hv
        self.count = _sum_into(self.eligible, index.cell, index.n_cells)
        self.chance = _sum_into(self._chance(), index.cell, index.n_cells)

    def chance_of_top(self) -> Float[Tensor, "Q hv"]:
        """The share of a query's candidates that are its keys."""
        index = self.index
        choices = self._n_candidates[index.text, :, index.unit].clamp(min=1)
        query = index.query
        keys = self.candidates[index.text[query], :, index.unit[query], index.key]
        return _sum_into(keys.float(), query, len(index.text)) / choices

    def _chance(self) -> Float[Tensor, "Q hv"]:
        index, pairs = self.index, self.index.mass_pairs
        even = self._visible / self._visible.sum(-1, keepdim=True).clamp(min=1)
        mass = even[index.text[pairs.query], :, pairs.query_token, pairs.key_token]
        chance = _sum_into(mass * pairs.share[:, None], pairs.query, len(index.text))
        chance = torch.where(self._top[:, None], self.chance_of_top(), chance)
        if self._choice.any():
            even = torch.zeros_like(self.choosable, dtype=torch.float32)
            chosen = index.choices.hits(even, self.choosable)
            chance = torch.where(self._choice[:, None], chosen, chance)
        return self.eligible * torch.where(self._breadth[:, None], 1.0, chance)

    @cached_property
    def _ceiling(self) -> Float[Tensor, "B hv n n"]:
        return torch.where(self.candidates, 2.0, -1.0).to(self._device)

    @cached_property
    def _top_pairs(self) -> tuple[Segments, Tensor]:
        """The pairs that may hold the largest weight, and the rows of their queries."""
        index = self.index
        weight = self._allowed * self.eligible[index.query]
        keep = self._top[index.query] & (weight > 0).any(1)
        query, key = index.query[keep], index.key[keep]
        rows = index.text[query] * index.units.n + index.unit[query]
        return self._segments(index.rows(query, key), weight[keep], query), rows.to(self._device)

    @cached_property
    def _evenness_segments(self) -> dict[str, Segments]:
        """The queries of each score of evenness, if a role has that score."""
        index, by_score = self.index, {}
        for score in ("entropy", "content entropy"):
            query = torch.nonzero(index.scored_by(score)).flatten()
            rows = index.text[query] * index.units.n + index.unit[query]
            if len(rows):
                by_score[score] = self._segments(rows, self.eligible[query], query)
        return by_score

    @cached_property
    def _mass_segments(self) -> Segments:
        return self._segments_of(self.index.mass_pairs)

    @cached_property
    def _all_segments(self) -> Segments:
        return self._segments_of(self.index.token_pairs)

    def _segments_of(self, pairs: TokenPairs) -> Segments:
        S = self._visible.shape[-1]
        rows = (self.index.text[pairs.query] * S + pairs.query_token) * S + pairs.key_token
        weights = pairs.share[:, None] * self.eligible[pairs.query]
        return self._segments(rows, weights, pairs.query)

    def _segments(
        self, rows: Int[Tensor, " K"], weights: Float[Tensor, "K hv"], query: Int[Tensor, " K"]
    ) -> Segments:
        """Weighted rows of a table, in the cells of their queries."""
        length = torch.bincount(self.index.cell[query], minlength=self.index.n_cells)
        starts = length.cumsum(0) - length
        return Segments(*(part.to(self._device) for part in (rows, starts, weights)))

    def value(
        self,
        block: HeadBlock,
        table: Float[Tensor, "N h"],
        evenness: Mapping[str, Float[Tensor, "B h T"]],
    ) -> Float[Tensor, "cells h"]:
        """What each head of a block scores in each cell, summed over the queries.

        Args:
            table: The weights of the block, heads last.
            evenness: The evenness of each row, 0 to 1, by the score that it is for.
        """
        total = self._mass_segments.sums(table, block.heads)
        if len(self._top_pairs[0].rows):
            total += self._top_sums(block, table)
        if len(self.index.choices.query):
            total += self._choice_sums(block)
        for score in evenness.keys() & self._evenness_segments.keys():
            segments = self._evenness_segments[score]
            total += segments.sums(heads_last(evenness[score]), block.heads)
        return total

    def mass(self, block: HeadBlock, table: Float[Tensor, "N h"]) -> Float[Tensor, "cells h"]:
        """The sum of a table of token pairs over the relations, whichever score a role has."""
        return self._all_segments.sums(table, block.heads)

    def top_of(self, queries: Int[Tensor, " K"], rows: Float[Tensor, "K n"]) -> Float[Tensor, " K"]:
        """Whether the largest weight of each query is on its relation, under a shared mask.

        Args:
            queries: Queries of roles scored by `top`, in order.
            rows: Their attention to all units of their text.
        """
        index = self.index
        candidates = self.candidates[index.text[queries], 0, index.unit[queries]]
        capped = torch.where(candidates, rows, -1.0)
        highest = capped.amax(-1, keepdim=True) * (1 - TIE)
        high = torch.ge(capped, highest, out=capped)  # 1 for each candidate that ties
        row_of = torch.full((len(index.text),), -1)
        row_of[queries] = torch.arange(len(queries))
        row, key = row_of[index.query], index.key
        row, key = row[row >= 0], key[row >= 0]
        hits = high.new_zeros(len(queries)).index_add_(0, row, high[row, key])
        return hits / high.sum(-1).clamp_(min=1.0)

    def _choice_sums(self, block: HeadBlock) -> Float[Tensor, "cells h"]:
        """Queries whose candidate with the largest weight is right."""
        index, choices = self.index, self.index.choices
        weights = choices.entries(index.units.fold(block.weights))
        hits = choices.hits(weights, _for_heads(self.choosable, block))
        hits = hits * _for_heads(self.eligible, block).to(hits)
        return hits.new_zeros(index.n_cells, hits.shape[1]).index_add_(
            0, index.cell.to(hits.device), hits
        )

    def _top_sums(self, block: HeadBlock, table: Float[Tensor, "N h"]) -> Float[Tensor, "cells h"]:
        """Queries whose largest weight is on the relation; weights that tie share it."""
        segments, rows = self._top_pairs
        folded = self.index.units.fold(block.weights)
        capped = torch.minimum(folded, _for_heads(self._ceiling, block))
        highest = capped.amax(-1, keepdim=True).mul_(1 - TIE)
        if self.index.units.grid != "token":
            table = heads_last(folded)
        tied = torch.ge(capped, highest, out=capped).sum(-1).clamp_(min=1.0)
        high, ties = (
            heads_last(values).index_select(0, rows) for values in (highest[..., 0], tied)
        )
        hits = torch.ge(table.index_select(0, segments.rows), high).to(ties).div_(ties)
        in_order = replace(segments, rows=torch.arange(len(rows), device=rows.device))
        return in_order.sums(hits, block.heads)


def sink_keys(items: Sequence[Item], S: int) -> Bool[Tensor, "B S"]:
    """The keys where attention may rest, in texts padded to `S`: first and special tokens."""
    sinks = torch.ones(len(items), S, dtype=torch.bool)
    for row, item in enumerate(items):
        inside = [tokens[0] for tokens in item.units["token"] if tokens[0]]
        sinks[row, inside] = False
        sinks[row, len(item.ids) :] = False
    return sinks


def evenness_of(
    block: HeadBlock, visible: Bool[Tensor, "B #H T S"], sinks: Bool[Tensor, "B S"]
) -> dict[str, Float[Tensor, "B h T"]]:
    """The entropy of each row as a share of that of even attention, 0 to 1.

    Over all keys, and over those that are not sinks: a row that leaves almost no attention to them
    counts as 0.
    """
    visible = visible if visible.shape[1] == 1 else visible[:, block.heads]
    # The positions of the sinks of each text, padded to the text with the most.
    present, positions = (
        part.to(visible.device) for part in sinks.to(torch.uint8).topk(int(sinks.sum(1).max()))
    )
    not_sinks = ~sinks[:, None, None].to(visible.device)
    n_keys, n_content = visible.sum(-1), (visible & not_sinks).sum(-1)
    shape = (*block.weights.shape[:3], positions.shape[1])
    on_sinks = block.weights.gather(3, positions[:, None, None].expand(shape))
    on_sinks = on_sinks * present[:, None, None]
    left = 1 - on_sinks.sum(-1)
    # H = Σ over sinks + left · (H of the rest) − left ln left
    content = (block.entropy + torch.special.xlogy(on_sinks, on_sinks).sum(-1)) / left
    content = (content + left.clamp(min=_LEAST_LEFT).log()) * _per_nat(n_content)
    content = torch.where(left > _LEAST_LEFT, content.clamp(0.0, 1.0), 0.0)
    return {"entropy": block.entropy * _per_nat(n_keys), "content entropy": content}


def _per_nat(n_keys: Int[Tensor, "B #h T"]) -> Float[Tensor, "B #h T"]:
    """One over the entropy of even attention."""
    return 1.0 / n_keys.clamp(min=2).float().log()


def heads_last(values: Float[Tensor, "B h *rest"]) -> Float[Tensor, "N h"]:
    return values.movedim(1, -1).reshape(-1, values.shape[1])


def _for_heads(weights: Tensor, block: HeadBlock) -> Tensor:
    """The columns of the block's heads, where heads differ."""
    return weights if weights.shape[1] == 1 else weights[:, block.heads]


def _sum_into(
    values: Float[Tensor, "K hv"], into: Int[Tensor, " K"], size: int
) -> Float[Tensor, "_ hv"]:
    return values.new_zeros(size, values.shape[1]).index_add_(0, into, values)
