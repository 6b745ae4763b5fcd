"""Who is asked for whom in a batch of texts, under each role, and what of it may be seen.

Sums are of cells: one text and one role. What belongs to one cell stands together, in the order
of the cells, and heads come last: so a sum is one pass over rows that lie in memory as they are
needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag

from headwise.roles.evaluation._units import Units
from headwise.roles.relations import Item, Role


@dataclass(frozen=True)
class Runs:
    """Rows of a table, some for each cell: where each is, and where each cell begins."""

    at: Int[Tensor, " K"]
    begins: Int[Tensor, " cells"]

    @classmethod
    def of(cls, at: Int[Tensor, " K"], cell: Int[Tensor, " K"], cells: int) -> "Runs":
        length = torch.bincount(cell, minlength=cells)
        return cls(at, length.cumsum(0) - length)

    def to(self, device: torch.device) -> "Runs":
        return Runs(self.at.to(device), self.begins.to(device))

    def sums(
        self, table: Float[Tensor, "N h"], weights: Float[Tensor, "K hv"]
    ) -> Float[Tensor, "cells h"]:
        """The weighted sum of the rows of each cell; `hv` is 1, or a weight for each head."""
        at, weights = self.at, weights.to(table)
        if weights.shape[1] == 1:
            return embedding_bag(
                at, table, self.begins, mode="sum", per_sample_weights=weights[:, 0].contiguous()
            )
        rows = table.index_select(0, at) * weights
        return embedding_bag(torch.arange(len(at), device=at.device), rows, self.begins, mode="sum")


class RelationIndex:
    """The queries of all roles on one grid, their keys, and the tokens that these stand for.

    Attributes:
        frame: The units.
        text, cell, unit, role: Of each query: its text, text and role, unit, and role.
        of, key: Of each pair: the number of its query, and the key.
        spread, whole: Pairs of tokens of the roles that are scored by mass, and of all roles.
    """

    def __init__(self, frame: Units, items: Sequence[Item], roles: Sequence[Role]) -> None:
        self.frame, self._roles = frame, roles
        self.cells = len(items) * len(roles)
        number = _numbers(frame, items, roles)
        queries, self.of = torch.unique_consecutive(number // frame.n, return_inverse=True)
        self.key = number % frame.n
        self.cell, self.unit = queries // frame.n, queries % frame.n
        self.text, self.role = self.cell // len(roles), self.cell % len(roles)
        self.whole = _spread(self, torch.ones_like(self.of, dtype=torch.bool))
        self.spread = _spread(self, self.scored("mass")[self.of])

    def scored(self, how: str) -> Bool[Tensor, " Q"]:
        """Which queries are scored in this way."""
        return torch.tensor([role.score == how for role in self._roles])[self.role]

    @cached_property
    def structure(self) -> Bool[Tensor, " Q"]:
        """Which queries are of roles that speak of structure."""
        return torch.tensor([role.kind == "structure" for role in self._roles])[self.role]

    def at(self, query: Int[Tensor, " K"], key: Int[Tensor, " K"]) -> Int[Tensor, " K"]:
        """Where pairs stand in a table of all pairs of units."""
        n = self.frame.n
        return (self.text[query] * n + self.unit[query]) * n + key


@dataclass(frozen=True)
class Spread:
    """Pairs of tokens that queries stand for, each with its share of the query."""

    of: Int[Tensor, " E"]
    query: Int[Tensor, " E"]
    key: Int[Tensor, " E"]
    share: Float[Tensor, " E"]


def _numbers(frame: Units, items: Sequence[Item], roles: Sequence[Role]) -> Int[Tensor, " P"]:
    """All pairs, each as one number: of its cell, its query, its key."""
    n, found = frame.n, [np.zeros(0, dtype=np.int64)]
    for text, item in enumerate(items):
        there = np.array([bool(one) for one in frame.units[text]], dtype=bool)
        for number, role in enumerate(roles):
            those = item.pairs.get(role.name, ()) if role.grid == frame.grid else ()
            if not those:
                continue
            pairs = np.array(those, dtype=np.int64)
            if frame.grid != "token":
                pairs = pairs[there[pairs].all(1)]
            cell = text * len(roles) + number
            found.append((cell * n + pairs[:, 0]) * n + pairs[:, 1])
    return torch.from_numpy(np.unique(np.concatenate(found)))


def _spread(asked: RelationIndex, wanted: Bool[Tensor, " P"]) -> Spread:
    of, key = asked.of[wanted], asked.key[wanted]
    if asked.frame.grid == "token":
        return Spread(of, asked.unit[of], key, torch.ones(len(of)))
    tokens = asked.frame.tokens_of
    each = zip(
        of.tolist(), asked.text[of].tolist(), asked.unit[of].tolist(), key.tolist(), strict=True
    )
    # Two keys of one query may share a token, which it attends to once.
    found = sorted(
        {
            (number, one, other, len(tokens(text, unit)))
            for number, text, unit, those in each
            for one in tokens(text, unit)
            for other in tokens(text, those)
        }
    )
    number, one, other, size = torch.tensor(found, dtype=torch.int64).reshape(-1, 4).unbind(1)
    return Spread(number, one, other, 1.0 / size)
