"""How far the weights of a batch lie on relations: sums of each text, for heads and for rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.roles.relations import Grid, Item, Role

_EQUAL = 1 - 1e-6  # weights this close to the largest are as large
OFFSETS = tuple(by for by in range(-10, 11) if by)


@dataclass(frozen=True)
class Sums:
    """Of each text, role and head: the score, how many queries there were, and chance."""

    value: Float[Tensor, "B R H"]
    count: Float[Tensor, "B R H"]
    even: Float[Tensor, "B R H"]


class GridBatch:
    """The texts of a batch on one grid, and their pairs under some roles."""

    def __init__(self, grid: Grid, items: Sequence[Item], roles: Sequence[Role], S: int) -> None:
        self.grid, self.items, self.roles = grid, items, roles
        self._S = S
        units = [item.units[grid] for item in items]
        # On the grid of tokens a unit is its token, wherever it stands.
        self.n = S if grid == "token" else max(1, *(len(one) for one in units))
        pairs = [
            (at, number, query, key)
            for at, item in enumerate(items)
            for number, role in enumerate(roles)
            for query, key in sorted(set(item.pairs.get(role.name, ())))
            if grid == "token" or (units[at][query] and units[at][key])
        ]
        self._pairs = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 4)
        # The queries that are asked, each once, and the query of each pair.
        self._asked, self._of = torch.unique(self._pairs[:, :3], dim=0, return_inverse=True)
        self._top = torch.tensor([role.score == "top" for role in roles])

    @cached_property
    def tokens(self) -> Float[Tensor, "B n S"]:
        """Which tokens each unit is made of."""
        made = torch.zeros(len(self.items), self.n, self._S)
        for at, item in enumerate(self.items):
            for unit, those in enumerate(item.units[self.grid]):
                made[at, those[0] if self.grid == "token" else unit, list(those)] = 1.0
        return made

    def to_grid(self, weights: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H n n"]:
        """The attention of units: over the pieces of a query the mean, over those of a key the sum.

        A mention is what the piece that is attended to most says of it: a sum would favour long
        names.
        """
        if self.grid == "token":
            return weights
        tokens = self.tokens.to(weights)[:, None]  # B 1 n S
        asked = tokens / tokens.sum(-1, keepdim=True).clamp(min=1.0)
        if self.grid == "word":
            return asked @ weights @ tokens.mT
        keys = [
            weights.masked_fill(tokens[:, :, unit, None] == 0, 0.0).amax(-1)
            for unit in range(self.n)
        ]
        return asked @ torch.stack(keys, dim=-1)

    def candidates(self, visible: Bool[Tensor, "B H n n"]) -> Bool[Tensor, "B H n n"]:
        """What may be the largest: content that is seen; for words and mentions not oneself."""
        tokens = self.tokens.to(visible.device)
        there = (tokens.sum(-1) > 0)[:, None, None]
        if self.grid == "token":
            return visible & there
        shared = (tokens @ tokens.mT > 0)[:, None]
        return visible & there & ~shared

    def sums(
        self,
        weights: Float[Tensor, "B H n n"],
        even: Float[Tensor, "B h n n"],
        visible: Bool[Tensor, "B h n n"],
    ) -> Sums:
        """What lies on each role. `even` is the same grid under even attention."""
        candidates = self.candidates(visible)
        highest = weights.masked_fill(~candidates, -1.0).amax(-1) * _EQUAL
        tied = ((weights >= highest[..., None]) & candidates).sum(-1)
        choice = candidates.sum(-1)
        pair = self._pairs.to(weights.device)
        texts, roles, queries, keys = pair.unbind(-1)
        top = self._top.to(weights.device)[roles][:, None]
        allowed = torch.where(
            top, candidates[texts, :, queries, keys], visible[texts, :, queries, keys]
        )
        weight = weights[texts, :, queries, keys]
        first = (weight >= highest[texts, :, queries]).to(weights)
        hit = torch.where(top, first / tied[texts, :, queries].clamp(min=1), weight) * allowed
        chance = (
            torch.where(
                top, 1.0 / choice[texts, :, queries].clamp(min=1), even[texts, :, queries, keys]
            )
            * allowed
        )
        return self._added(hit, chance, allowed, visible.sum(-1), choice)

    def _added(
        self, hit: Tensor, chance: Tensor, allowed: Tensor, seen: Tensor, choice: Tensor
    ) -> Sums:
        """Pairs become queries, queries become sums; a query without a choice says nothing."""
        of = self._of.to(hit.device)
        texts, roles, queries = self._asked.to(hit.device).unbind(-1)

        def by_query(values: Tensor) -> Tensor:
            return values.new_zeros(len(texts), values.shape[1]).index_add_(0, of, values)

        options = torch.where(
            self._top.to(hit.device)[roles][:, None],
            choice[texts, :, queries],
            seen[texts, :, queries],
        )
        eligible = ((by_query(allowed.to(hit)) > 0) & (options > 1)).to(hit)
        B, R, H = len(self.items), len(self.roles), hit.shape[1]
        at = texts * R + roles

        def by_text(values: Tensor) -> Tensor:
            values = values.expand(-1, H)
            return values.new_zeros(B * R, H).index_add_(0, at, values).reshape(B, R, H)

        return Sums(
            by_text(by_query(hit) * eligible),
            by_text(eligible),
            by_text(by_query(chance) * eligible),
        )

    def rules(
        self, candidates: Bool[Tensor, "B 1 n n"], tags: Sequence[str]
    ) -> Float[Tensor, "B K n n"]:
        """Heads that no one would call learned: a fixed offset, the nearest word of a class.

        Where a rule names nobody it guesses: it spreads over the candidates.
        """
        n = self.n
        there = candidates[:, 0]
        at = torch.arange(n, device=there.device)
        found = [(at[None, :] == at[:, None] + by) & there for by in OFFSETS]
        if self.grid == "word":
            for tag in tags:
                is_tag = torch.zeros(len(self.items), n, dtype=torch.bool)
                for row, item in enumerate(self.items):
                    is_tag[row, : len(item.tags)] = torch.tensor(
                        [one == tag for one in item.tags], dtype=torch.bool
                    )
                those = there & is_tag.to(there.device)[:, None]
                found += [_nearest(those, at, way) for way in (-1, 1)]
        named = torch.stack(found, dim=1).float()
        even = candidates / candidates.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(named.any(-1, keepdim=True), named, even)


def rule_names(grid: Grid, tags: Sequence[str]) -> list[str]:
    """What the rules of a grid are called, in their order."""
    names = [f"offset {by:+d}" for by in OFFSETS]
    if grid == "word":
        names += [f"nearest {tag} to the {way}" for tag in tags for way in ("left", "right")]
    return names


def _nearest(those: Bool[Tensor, "B n n"], at: Tensor, way: int) -> Bool[Tensor, "B n n"]:
    """Of these keys the nearest one on one side of each query."""
    far = (at[None, :] - at[:, None]) * way
    distance = torch.where(those & (far > 0), far, len(at) + 1)
    nearest = distance.amin(-1, keepdim=True)
    return (distance == nearest) & (nearest <= len(at))
