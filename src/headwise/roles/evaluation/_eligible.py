"""What may be seen of what is asked for, and how some weights score on it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.roles.evaluation._relation_index import RelationIndex, Runs, Spread

_EQUAL = 1 - 1e-6  # weights this close to the largest are as large


@dataclass(frozen=True)
class Part:
    """The weights of some heads of a layer, and how even those of each row are, from 0 to 1."""

    heads: slice
    weights: Float[Tensor, "B h T S"]
    evenness: Float[Tensor, "B h T"]

    @cached_property
    def table(self) -> Float[Tensor, "N h"]:
        return heads_last(self.weights)


class EligiblePairs:
    """The pairs of a batch that count under some mask; all else about them is settled before.

    A query counts if one of its keys may be seen, or be the largest, and there is a choice.

    Attributes:
        candidates: Who may be the largest of each query.
        count: How many queries of each cell count.
        even: What even attention scores in each cell.
    """

    def __init__(self, asked: RelationIndex, visible: Bool[Tensor, "B hv T S"]) -> None:
        self.asked, self._device = asked, visible.device
        self._visible = visible.cpu()
        units = asked.frame.fold(self._visible.float()) > 0
        self.candidates = units & ~asked.frame.barred[:, None]
        self._choice = self.candidates.sum(-1)  # B hv n
        text, unit, of = asked.text, asked.unit, asked.of
        self._top = asked.scored("top")
        pair = (text[of], slice(None), unit[of], asked.key)
        self._allowed = torch.where(self._top[of, None], self.candidates[pair], units[pair])
        some = _added(self._allowed.float(), of, len(text)) > 0
        options = torch.where(
            self._top[:, None],
            self._choice[text, :, unit],
            units.sum(-1)[text, :, unit],
        )
        self.eligible = (some & (options > 1)).float()  # Q hv
        self.count = _added(self.eligible, asked.cell, asked.cells)
        self.even = _added(self._chance(), asked.cell, asked.cells)

    def chance_of_top(self) -> Float[Tensor, "Q hv"]:
        """The share of a query's candidates that it is asked for."""
        asked = self.asked
        choice = self._choice[asked.text, :, asked.unit].clamp(min=1)
        wanted = self.candidates[asked.text[asked.of], :, asked.unit[asked.of], asked.key]
        return _added(wanted.float(), asked.of, len(asked.text)) / choice

    def _chance(self) -> Float[Tensor, "Q hv"]:
        asked, spread = self.asked, self.asked.spread
        seen = self._visible / self._visible.sum(-1, keepdim=True).clamp(min=1)
        mass = seen[asked.text[spread.of], :, spread.query, spread.key] * spread.share[:, None]
        chance = _added(mass, spread.of, len(asked.text))
        chance = torch.where(self._top[:, None], self.chance_of_top(), chance)
        return self.eligible * torch.where(asked.scored("entropy")[:, None], 1.0, chance)

    @cached_property
    def _ceiling(self) -> Float[Tensor, "B hv n n"]:
        return torch.where(self.candidates, 2.0, -1.0).to(self._device)

    @cached_property
    def _tops(self) -> tuple[Runs, Tensor, Tensor]:
        """The pairs that may be the largest, where their queries stand, and what they weigh."""
        asked = self.asked
        weight = self._allowed * self.eligible[asked.of]
        keep = self._top[asked.of] & (weight > 0).any(1)
        of, key = asked.of[keep], asked.key[keep]
        runs = Runs.of(asked.at(of, key), asked.cell[of], asked.cells).to(self._device)
        rows = asked.text[of] * asked.frame.n + asked.unit[of]
        return runs, rows.to(self._device), weight[keep].to(self._device)

    @cached_property
    def _breadths(self) -> tuple[Runs, Tensor]:
        asked = self.asked
        keep = asked.scored("entropy")
        at = asked.text[keep] * asked.frame.n + asked.unit[keep]
        runs = Runs.of(at, asked.cell[keep], asked.cells)
        return runs.to(self._device), self.eligible[keep].to(self._device)

    @cached_property
    def _spread(self) -> tuple[Runs, Tensor]:
        return self._masses(self.asked.spread)

    @cached_property
    def _whole(self) -> tuple[Runs, Tensor]:
        return self._masses(self.asked.whole)

    def _masses(self, spread: Spread) -> tuple[Runs, Tensor]:
        S = self._visible.shape[-1]
        at = (self.asked.text[spread.of] * S + spread.query) * S + spread.key
        runs = Runs.of(at, self.asked.cell[spread.of], self.asked.cells)
        weights = spread.share[:, None] * self.eligible[spread.of]
        return runs.to(self._device), weights.to(self._device)

    def value(self, part: Part) -> Float[Tensor, "cells h"]:
        """What each cell scores, summed over its queries."""
        runs, weights = self._spread
        total = runs.sums(part.table, _of(weights, part))
        if len(self._tops[0].at):
            total += self._top_sums(part)
        runs, weights = self._breadths
        if len(runs.at):
            total += runs.sums(heads_last(part.evenness), _of(weights, part))
        return total

    def mass(self, part: Part, table: Float[Tensor, "N h"]) -> Float[Tensor, "cells h"]:
        """What a table of pairs of tokens holds on the relations, also where it is no score."""
        runs, weights = self._whole
        return runs.sums(table, _of(weights, part))

    def _top_sums(self, part: Part) -> Float[Tensor, "cells h"]:
        """Weights that tie for the largest share it."""
        runs, rows, weights = self._tops
        token = self.asked.frame.grid == "token"
        folded = self.asked.frame.fold(part.weights)
        capped = torch.minimum(folded, _of(self._ceiling, part))
        highest = capped.amax(-1, keepdim=True).mul_(_EQUAL)
        table = part.table if token else heads_last(folded)
        tied = torch.ge(capped, highest, out=capped).sum(-1).clamp_(min=1.0)
        high, ties = (heads_last(one).index_select(0, rows) for one in (highest[..., 0], tied))
        hits = torch.ge(table.index_select(0, runs.at), high).to(ties).div_(ties)
        every = Runs(torch.arange(len(rows), device=rows.device), runs.begins)
        return every.sums(hits, _of(weights, part))


def heads_last(values: Float[Tensor, "B h *rest"]) -> Float[Tensor, "N h"]:
    return values.movedim(1, -1).reshape(-1, values.shape[1])


def _of(weights: Tensor, part: Part) -> Tensor:
    """Those of the heads, where heads differ."""
    return weights if weights.shape[1] == 1 else weights[:, part.heads]


def _added(
    values: Float[Tensor, "K hv"], into: Int[Tensor, " K"], size: int
) -> Float[Tensor, "_ hv"]:
    return values.new_zeros(size, values.shape[1]).index_add_(0, into, values)
