"""The relation index: the queries, keys, token pairs and candidates of every role in a batch.

Scores are summed over cells; a cell is one text and one role.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.roles.evaluation._units import Units
from headwise.roles.relations import Role

TIE = 1e-6  # values this close to the largest, as a share of it, tie with it


@dataclass(frozen=True)
class TokenPairs:
    """The pairs of tokens behind the pairs of units, each with its share of the query.

    Attributes:
        query: The number of the query.
        query_token: The token that attends.
        key_token: The token that is attended to.
        share: The weight of the pair in the mass of the query.
    """

    query: Int[Tensor, " E"]
    query_token: Int[Tensor, " E"]
    key_token: Int[Tensor, " E"]
    share: Float[Tensor, " E"]

    def take(self, rows: Bool[Tensor, " E"]) -> "TokenPairs":
        return TokenPairs(
            self.query[rows], self.query_token[rows], self.key_token[rows], self.share[rows]
        )


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
            for text, item in enumerate(units.items)
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
        tied = (allowed & (scores >= highest - highest.abs() * TIE)).to(scores)
        total.index_add_(0, query, tied)
        return torch.zeros_like(total).index_add_(0, query, tied * right) / total.clamp(min=1)

    def _sum(self, values: Float[Tensor, "C hv"]) -> Float[Tensor, "Q hv"]:
        return values.new_zeros(self.n_queries, values.shape[1]).index_add_(0, self.query, values)


class RelationIndex:
    """The queries of all roles on one grid, their keys, and the pairs of tokens behind them.

    Attributes:
        units: The units that are queries and keys.
        roles: The roles, of which some are on other grids.
        n_cells: The number of cells: texts times roles.
        text: The text of each query.
        role: Its role.
        cell: Its cell.
        unit: Its unit.
        query: For each pair, the number of its query.
        key: For each pair, the unit that is its key.
        choices: The candidates of the roles that are choices.
        mass_pairs: The pairs of tokens of the roles that are scored by mass.
        token_pairs: The pairs of tokens of all roles.
    """

    def __init__(self, units: Units, roles: Sequence[Role]) -> None:
        self.units, self.roles = units, roles
        self.n_cells = len(units.items) * len(roles)
        number = _pair_numbers(units, roles)
        queries, self.query = torch.unique_consecutive(number // units.n, return_inverse=True)
        self.key = number % units.n
        self.cell, self.unit = queries // units.n, queries % units.n
        self.text, self.role = self.cell // len(roles), self.cell % len(roles)
        self.choices = Choices.of(units, roles, queries, number)
        self.token_pairs = _token_pairs(self)
        self.mass_pairs = self.token_pairs.take(self.scored_by("mass")[self.token_pairs.query])

    def scored_by(self, score: str) -> Bool[Tensor, " Q"]:
        """Which queries are of roles with this score."""
        return torch.tensor([role.score == score for role in self.roles])[self.role]

    @cached_property
    def structural(self) -> Bool[Tensor, " Q"]:
        """Which queries are of structural roles."""
        return torch.tensor([role.kind == "structure" for role in self.roles])[self.role]

    @cached_property
    def breadth(self) -> Bool[Tensor, " Q"]:
        """Which queries are of roles without a relation, which are scored by evenness."""
        return torch.tensor([role.kind == "breadth" for role in self.roles])[self.role]

    def rows(self, query: Int[Tensor, " K"], key: Int[Tensor, " K"]) -> Int[Tensor, " K"]:
        """The rows of pairs in a table of all pairs of units."""
        n = self.units.n
        return (self.text[query] * n + self.unit[query]) * n + key

    def is_key(self, queries: Int[Tensor, " K"]) -> Bool[Tensor, "K n"]:
        """Which units are keys of each of some queries."""
        keys = torch.zeros(len(self.text), self.units.n, dtype=torch.bool)
        keys[self.query, self.key] = True
        return keys[queries]


def _pair_numbers(units: Units, roles: Sequence[Role]) -> Int[Tensor, " P"]:
    """All pairs, each as one number made of its cell, query and key; sorted."""
    n, numbers = units.n, [np.zeros(0, dtype=np.int64)]
    for text, item in enumerate(units.items):
        has_tokens = np.array([bool(tokens) for tokens in units.units[text]], dtype=bool)
        for column, role in enumerate(roles):
            relation = item.pairs.get(role.name, ()) if role.grid == units.grid else ()
            if not relation:
                continue
            pairs = np.array(relation, dtype=np.int64)
            if units.grid != "token":
                pairs = pairs[has_tokens[pairs].all(1)]
            cell = text * len(roles) + column
            numbers.append((cell * n + pairs[:, 0]) * n + pairs[:, 1])
    return torch.from_numpy(np.unique(np.concatenate(numbers)))


def _token_pairs(index: RelationIndex) -> TokenPairs:
    query, key = index.query, index.key
    if index.units.grid == "token":
        return TokenPairs(query, index.unit[query], key, torch.ones(len(query)))
    tokens = index.units.tokens_of
    incoming = torch.tensor([role.incoming for role in index.roles])[index.role[query]]
    # If the candidates attend to the query, each of several right ones counts equally.
    n_keys = torch.bincount(query, minlength=len(index.text))[query]
    columns = (
        query,
        index.text[query],
        torch.where(incoming, key, index.unit[query]),
        torch.where(incoming, index.unit[query], key),
        torch.where(incoming, n_keys, 1),
    )
    # Two keys of one query may share a token, whose attention counts once.
    entries = sorted(
        {
            (number, query_token, key_token, share * len(tokens(text, unit)))
            for number, text, unit, key_unit, share in zip(
                *(column.tolist() for column in columns), strict=True
            )
            for query_token in tokens(text, unit)
            for key_token in tokens(text, key_unit)
        }
    )
    number, query_token, key_token, size = (
        torch.tensor(entries, dtype=torch.int64).reshape(-1, 4).unbind(1)
    )
    return TokenPairs(number, query_token, key_token, 1.0 / size)
