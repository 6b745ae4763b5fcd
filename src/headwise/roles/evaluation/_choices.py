"""Choices: which of the candidates of a query has the largest weight, and rules that choose."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from headwise.roles.evaluation._units import Units
from headwise.roles.relations import Item, Role

_TIE = 1e-6  # scores this close to the largest, as a share of it, tie with it
RULES = ("nearest", "first", "longest", "most repeated")


@dataclass(frozen=True)
class Choices:
    """The candidates of every query of a role that is a choice, as entries of one list.

    Units of another piece of the text, or that share a token with the query, are left out.

    Attributes:
        n_queries: The number of queries of all roles.
        query: For each candidate, the number of its query.
        text: The text of both.
        unit: The unit that is the query.
        candidate: The unit that is the candidate.
        right: Whether the candidate is a key of the query.
        incoming: Whether the candidate attends to the query, and not the query to it.
    """

    n_queries: int
    query: Int[Tensor, " C"]
    text: Int[Tensor, " C"]
    unit: Int[Tensor, " C"]
    candidate: Int[Tensor, " C"]
    right: Bool[Tensor, " C"]
    incoming: Bool[Tensor, " C"]

    @classmethod
    def of(
        cls,
        units: Units,
        items: Sequence[Item],
        roles: Sequence[Role],
        queries: Int[Tensor, " Q"],
        pairs: Int[Tensor, " P"],
    ) -> "Choices":
        """The candidates of all queries that have a key.

        Args:
            queries: Each query as one number made of its text, role and unit; sorted.
            pairs: The same with the unit of a key; sorted.
        """
        n, members = units.n, units.units
        entries = [
            (cell * n + query) * n + candidate
            for text, item in enumerate(items)
            for cell, role in enumerate(roles, text * len(roles))
            if role.score == "choice" and role.grid == units.grid
            for query, candidate in item.candidates.get(role.name, ())
            if members[text][query] and members[text][candidate]
        ]
        number = torch.tensor(sorted(entries), dtype=torch.int64)
        number = number[torch.isin(number // n, queries)]
        cell = number // n // n
        return cls(
            n_queries=len(queries),
            query=torch.searchsorted(queries, number // n),
            text=cell // len(roles),
            unit=number // n % n,
            candidate=number % n,
            right=torch.isin(number, pairs),
            incoming=torch.tensor([role.incoming for role in roles])[cell % len(roles)],
        )

    @property
    def ends(self) -> tuple[Int[Tensor, " C"], Int[Tensor, " C"]]:
        """The unit that attends and the unit that is attended to, of each candidate."""
        row = torch.where(self.incoming, self.candidate, self.unit)
        return row, torch.where(self.incoming, self.unit, self.candidate)

    def entries(self, table: Tensor) -> Tensor:
        """The entry of each candidate in a table of pairs of units, `B h n n`: `C h`."""
        text, row, column = (part.to(table.device) for part in (self.text, *self.ends))
        return table[text, :, row, column]

    def allowed(self, candidates: Bool[Tensor, "B hv n n"]) -> Bool[Tensor, "C hv"]:
        """Which candidates the mask allows, for queries that leave a choice.

        A query decides nothing if all of its candidates are right.
        """
        allowed = self.entries(candidates)
        right = self._sum((allowed & self.right[:, None]).float()) > 0
        wrong = self._sum((allowed & ~self.right[:, None]).float()) > 0
        return allowed & (right & wrong)[self.query]

    def hits(
        self, scores: Float[Tensor, "C h"], allowed: Bool[Tensor, "C hv"]
    ) -> Float[Tensor, "Q h"]:
        """Whether the allowed candidate with the largest score is right; ties share."""
        query, right, allowed = (
            part.to(scores.device) for part in (self.query, self.right[:, None], allowed)
        )
        scores = scores.masked_fill(~allowed, -torch.inf)
        total = scores.new_zeros(self.n_queries, scores.shape[1])
        into = query[:, None].expand(-1, scores.shape[1])
        highest = torch.full_like(total, -torch.inf).scatter_reduce(0, into, scores, "amax")[query]
        tied = (allowed & (scores >= highest - highest.abs() * _TIE)).to(scores)
        total.index_add_(0, query, tied)
        return torch.zeros_like(total).index_add_(0, query, tied * right) / total.clamp(min=1)

    def rule_scores(
        self, items: Sequence[Item], offsets: Sequence[int], allowed: Bool[Tensor, "C 1"]
    ) -> Float[Tensor, "C K"]:
        """How rules score the candidates: one rule per offset, then `RULES`.

        The candidate at offset −2 is the second one before the query.
        """
        mentions = [_mentions(item) for item in items]
        first = np.cumsum([0, *(each.shape[1] for each in mentions)])[self.text.numpy()]
        numbers = np.concatenate(mentions, axis=1)
        start, end, length, repeats = numbers[:, first + self.candidate.numpy()]
        own_start, own_end, *_ = numbers[:, first + self.unit.numpy()]
        place = np.where(start > own_start, start - own_end, end - own_start)
        rank = _ranks(self.query.numpy(), place, allowed[:, 0].numpy())
        at_offset = rank[:, None] == np.array(offsets)
        rules = np.stack([-np.abs(place), -start, length, repeats], axis=-1)
        return torch.from_numpy(np.concatenate([at_offset, rules], axis=-1)).float()

    def _sum(self, values: Float[Tensor, "C hv"]) -> Float[Tensor, "Q hv"]:
        return values.new_zeros(self.n_queries, values.shape[1]).index_add_(0, self.query, values)


def _mentions(item: Item) -> Int64[np.ndarray, "4 mentions"]:
    """The first and the last token of each mention of a text, its characters, its occurrences."""
    units = item.units.get("mention", ())
    names = item.mentions or [""] * len(units)
    rows = (
        [min(tokens, default=0) for tokens in units],
        [max(tokens, default=0) for tokens in units],
        [len(name) for name in names],
        [item.text.count(name) if name else 0 for name in names],
    )
    return np.array(rows, dtype=np.int64)


def _ranks(
    query: Int64[np.ndarray, " C"], place: Int64[np.ndarray, " C"], allowed: Bool[np.ndarray, " C"]
) -> Int64[np.ndarray, " C"]:
    """The rank of each candidate by distance: 1, 2, … after its query, −1, −2, … before it."""
    ranks = np.zeros(len(query), dtype=np.int64)
    for side in (1, -1):
        there = np.flatnonzero(allowed & (side * place > 0))
        order = there[np.lexsort((side * place[there], query[there]))]
        first = np.searchsorted(query[order], query[order])
        ranks[order] = side * (np.arange(len(order)) - first + 1)
    return ranks
