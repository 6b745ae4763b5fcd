"""Synthetic heads: heuristics that a head must beat, and planted heads that the test must find.

They are scored like the heads of a model, under a mask that all heads share. A planted head is
scored on its own role alone, from the rows of attention that this role reads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from headwise.roles.evaluation._eligible import EligiblePairs
from headwise.roles.evaluation._relation_index import Choices, RelationIndex
from headwise.roles.relations import Grid, Item

OFFSETS = tuple(range(-10, 11))
RULES = ("nearest", "first", "longest", "most repeated")  # among the candidates of a choice
_MOST = 2**22  # weights of planted heads computed at once
_AFTER_ALL = 2**62  # the number of no row


def heuristic_names(grid: Grid) -> list[str]:
    """The names of the heuristics of a grid that are not fitted, in their order: offsets first.

    Mentions are candidates of a choice: the one at offset −2 is the second one before the query.
    """
    if grid == "mention":
        names = [f"candidate {offset:+d}" for offset in OFFSETS]
        return names + [f"{rule} candidate" for rule in RULES]
    return [f"offset {offset:+d}" for offset in OFFSETS]


def heuristic_sums(eligible: EligiblePairs) -> Float[Tensor, "cells K"]:
    """What each heuristic scores in each cell, under a mask that all heads share.

    A heuristic puts all its attention on the one candidate that it names, and spreads it over
    the candidates where it names none.
    """
    index = eligible.index
    if index.units.grid == "mention":
        choosable = eligible.choosable
        scores = _rule_scores(index.choices, index.units.items, choosable)
        values = index.choices.hits(scores, choosable) * eligible.eligible
    else:
        values = at_offsets(eligible, torch.arange(len(index.text))) * eligible.eligible
    return values.new_zeros(index.n_cells, values.shape[1]).index_add_(0, index.cell, values)


def _rule_scores(
    choices: Choices, items: Sequence[Item], allowed: Bool[Tensor, "C 1"]
) -> Float[Tensor, "C K"]:
    """How rules score the candidates: one rule per offset, then `RULES`.

    The candidate at offset −2 is the second one before the query.
    """
    mentions = [_mentions(item) for item in items]
    first = np.cumsum([0, *(each.shape[1] for each in mentions)])[choices.text.numpy()]
    numbers = np.concatenate(mentions, axis=1)
    start, end, length, repeats = numbers[:, first + choices.candidate.numpy()]
    own_start, own_end, *_ = numbers[:, first + choices.unit.numpy()]
    place = np.where(start > own_start, start - own_end, end - own_start)
    rank = _ranks(choices.query.numpy(), place, allowed[:, 0].numpy())
    at_offset = rank[:, None] == np.array(OFFSETS)
    rules = np.stack([-np.abs(place), -start, length, repeats], axis=-1)
    return torch.from_numpy(np.concatenate([at_offset, rules], axis=-1)).float()


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


def at_offsets(eligible: EligiblePairs, rows: Int[Tensor, " K"]) -> Float[Tensor, "K offset"]:
    """What each offset scores for some queries."""
    index, n = eligible.index, eligible.index.units.n
    candidates = eligible.candidates[index.text[rows], 0, index.unit[rows]]
    named = index.unit[rows, None] + torch.tensor(OFFSETS)
    inside = (named >= 0) & (named < n)
    named = named.clamp(0, max(0, n - 1))
    exists = inside & candidates.gather(1, named)
    chance = eligible.chance_of_top()[rows]
    return torch.where(exists, index.is_key(rows).gather(1, named).float(), chance)


def planted_sums(
    eligible: EligiblePairs, visible: Bool[Tensor, "B 1 T S"]
) -> Float[Tensor, "cells 1"]:
    """What the planted head of each role scores on that role, by the definitions for all heads.

    A query of the role attends equally to the tokens of its keys, all others to every visible
    token. A role without a relation, such as evenness, has an even head.
    """
    index = eligible.index
    planted = _PlantedAttention(index, visible.cpu())
    is_choice, is_top = index.scored_by("choice"), index.scored_by("top")
    scores = planted.mass()
    scores[index.breadth] = 1.0
    queries = torch.nonzero(is_top).flatten()
    for chunk in torch.split(queries, planted.rows_at_once):
        rows = planted.between_units(index.role[chunk], index.text[chunk], index.unit[chunk])
        scores[chunk] = eligible.top_of(chunk, rows)
    if is_choice.any():
        scores[is_choice] = _choices(planted, eligible)[is_choice]
    scores = scores[:, None] * eligible.eligible
    return scores.new_zeros(index.n_cells, 1).index_add_(0, index.cell, scores)


def _choices(planted: "_PlantedAttention", eligible: EligiblePairs) -> Float[Tensor, " Q"]:
    """Which queries choose a right candidate."""
    index, choices = eligible.index, eligible.index.choices
    row, column = choices.ends
    role = index.role[choices.query]
    weights = [
        planted.between_units(role[chunk], choices.text[chunk], row[chunk]).gather(
            1, column[chunk, None]
        )
        for chunk in torch.split(torch.arange(len(row)), planted.rows_at_once)
    ]
    return choices.hits(torch.cat(weights), eligible.choosable)[:, 0]


class _PlantedAttention:
    """The attention of the planted heads, a row for each role and query token.

    Attributes:
        rows_at_once: How many rows between units to compute at once.
    """

    def __init__(self, index: RelationIndex, visible: Bool[Tensor, "B 1 T S"]) -> None:
        self._index, self._visible = index, visible[:, 0]
        self._even = self._visible.float()
        self._even /= self._even.sum(-1, keepdim=True).clamp(min=1)
        pairs = index.token_pairs
        allowed = self._visible[index.text[pairs.query], pairs.query_token, pairs.key_token]
        allowed &= ~index.breadth[pairs.query]
        row = self._row(index.role[pairs.query], index.text[pairs.query], pairs.query_token)
        S = visible.shape[-1]
        entries = torch.unique((row * S + pairs.key_token)[allowed])
        self._keys = entries % S
        rows, n_keys = torch.unique_consecutive(entries // S, return_counts=True)
        # A last row without keys stands for all that have none.
        self._rows = torch.cat([rows, torch.tensor([_AFTER_ALL])])
        self._n_keys = torch.cat([n_keys, torch.tensor([0])])
        self._starts = self._n_keys.cumsum(0) - self._n_keys
        self.rows_at_once = max(1, _MOST // max(S, index.units.n * index.units.longest))

    def mass(self) -> Float[Tensor, " Q"]:
        """The attention of each query on its keys, for roles that are scored by mass."""
        index, pairs = self._index, self._index.mass_pairs
        text = index.text[pairs.query]
        row, _ = self._find(index.role[pairs.query], text, pairs.query_token)
        allowed = self._visible[text, pairs.query_token, pairs.key_token]
        weights = allowed * pairs.share / self._n_keys[row].clamp(min=1)
        return weights.new_zeros(len(index.text)).index_add_(0, pairs.query, weights)

    def between_units(
        self, role: Int[Tensor, " K"], text: Int[Tensor, " K"], unit: Int[Tensor, " K"]
    ) -> Float[Tensor, "K n"]:
        """The attention of units to all units of their text, each in the head of a role."""
        units = self._index.units
        if units.grid == "token":
            return self._of_tokens(role, text, unit)
        tokens, present = (part[text, unit] for part in units.padded)  # K p
        row, place = torch.nonzero(present, as_tuple=True)
        weights = self._of_tokens(role[row], text[row], tokens[row, place])
        folded = units.fold_keys(weights, text[row])
        total = folded.new_zeros(len(unit), units.n).index_add_(0, row, folded)
        return total / present.sum(1, keepdim=True).clamp(min=1)

    def _of_tokens(
        self, role: Int[Tensor, " K"], text: Int[Tensor, " K"], token: Int[Tensor, " K"]
    ) -> Float[Tensor, "K S"]:
        row, has_keys = self._find(role, text, token)
        weights = self._even[text, token]
        weights[has_keys] = 0.0
        n_keys = self._n_keys[row]
        first = self._starts[row] - (n_keys.cumsum(0) - n_keys)
        keys = self._keys[torch.arange(int(n_keys.sum())) + first.repeat_interleave(n_keys)]
        number = torch.arange(len(row)).repeat_interleave(n_keys)
        weights[number, keys] = (1.0 / n_keys).repeat_interleave(n_keys)
        return weights

    def _find(
        self, role: Int[Tensor, " K"], text: Int[Tensor, " K"], token: Int[Tensor, " K"]
    ) -> tuple[Int[Tensor, " K"], Bool[Tensor, " K"]]:
        """Where each row is stored, and whether it has keys; rows without keys share the last."""
        number = self._row(role, text, token)
        row = torch.searchsorted(self._rows, number)
        has_keys = self._rows[row] == number
        return torch.where(has_keys, row, len(self._rows) - 1), has_keys

    def _row(self, role: Tensor, text: Tensor, token: Tensor) -> Int[Tensor, " K"]:
        B, T, _ = self._visible.shape
        return (role * B + text) * T + token
