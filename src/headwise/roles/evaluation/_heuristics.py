"""Heuristics that a head must beat: fixed offsets, words of a class, rules that choose."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from headwise.roles.evaluation._eligible import EligiblePairs
from headwise.roles.evaluation._relation_index import Choices
from headwise.roles.evaluation._tag_rules import FAR, SIDES, TagRows
from headwise.roles.relations import Grid, Item

OFFSETS = tuple(range(-10, 11))
_RULES = ("nearest", "first", "longest", "most repeated")  # among the candidates of a choice


def heuristic_names(grid: Grid) -> list[str]:
    """The names of the heuristics of a grid that are not fitted, in their order: offsets first.

    Mentions are candidates of a choice: the one at offset −2 is the second one before the query.
    """
    if grid == "mention":
        names = [f"candidate {offset:+d}" for offset in OFFSETS]
        return names + [f"{rule} candidate" for rule in _RULES]
    return [f"offset {offset:+d}" for offset in OFFSETS]


def heuristic_sums(eligible: EligiblePairs, items: Sequence[Item]) -> Float[Tensor, "cells K"]:
    """What each heuristic scores in each cell, under a mask that all heads share.

    A heuristic puts all its attention on the one candidate that it names, and spreads it over
    the candidates where it names none.
    """
    index = eligible.index
    if index.units.grid == "mention":
        choosable = eligible.choosable
        scores = _rule_scores(index.choices, items, choosable)
        values = index.choices.hits(scores, choosable) * eligible.eligible
    else:
        values = _at_offsets(eligible, torch.arange(len(index.text))) * eligible.eligible
    return values.new_zeros(index.n_cells, values.shape[1]).index_add_(0, index.cell, values)


def _rule_scores(
    choices: Choices, items: Sequence[Item], allowed: Bool[Tensor, "C 1"]
) -> Float[Tensor, "C K"]:
    """How rules score the candidates: one rule per offset, then `_RULES`.

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


def tag_rows(eligible: EligiblePairs, items: Sequence[Item], tags: Sequence[str]) -> TagRows:
    """The nearest words of every part of speech for the eligible queries of structural roles.

    On the grid of tokens a word is named by the last of its tokens on the left, by the first on
    the right, and the query's own word may be named as well.
    """
    index = eligible.index
    grid = index.units.grid
    n = index.units.n
    rows = torch.nonzero(index.structural & (eligible.eligible[:, 0] > 0)).flatten()
    place, of_row = torch.unique(index.text[rows] * n + index.unit[rows], return_inverse=True)
    text, unit = place // n, place % n
    members, tag_of_unit = _by_tag(items, grid, tags, n)
    columns = members[text]  # U tag m
    allowed = eligible.candidates[text, 0, unit].gather(1, columns.clamp(min=0).flatten(1))
    allowed = allowed.view(columns.shape) & (columns >= 0)
    step = columns - unit[:, None, None]
    sides = [(step < 0, -1), (step > 0, 1), ((step <= 0) & (grid == "token"), -1)]
    assert len(sides) == len(SIDES)
    is_key = torch.zeros(len(index.text), n, dtype=torch.bool)
    is_key[index.query, index.key] = True
    distances, rights = [], []
    for inside, sign in sides:
        near = _two_nearest(torch.where(allowed & inside, sign * step, FAR))[of_row]
        key = (index.unit[rows, None, None] + sign * near).clamp(0, n - 1)
        right = is_key[rows].gather(1, key.flatten(1)).view(near.shape) & (near < FAR)
        distances.append(near)
        rights.append(right)
    return TagRows(
        item=index.text[rows].numpy(),
        role=index.role[rows].numpy(),
        tag=tag_of_unit[index.text[rows], index.unit[rows]].numpy(),
        chance=eligible.chance_of_top()[rows, 0].numpy(),
        distance=torch.stack(distances, 1).numpy().astype(np.int16),
        right=torch.stack(rights, 1).numpy(),
        offsets=_at_offsets(eligible, rows).numpy(),
    )


def _two_nearest(distance: Int[Tensor, "U tag m"]) -> Int[Tensor, "U 2 tag"]:
    nearest = distance.amin(-1)
    others = torch.where(distance == nearest[..., None], FAR, distance)
    return torch.stack([nearest, others.amin(-1)], 1)


def _by_tag(
    items: Sequence[Item], grid: Grid, tags: Sequence[str], n: int
) -> tuple[Int[Tensor, "B tag m"], Int[Tensor, "B n"]]:
    """The units with each part of speech, padded with −1, and the part of speech of each unit."""
    number = {tag: column for column, tag in enumerate(tags)}
    tag_of_unit = torch.full((len(items), n), -1)
    members: list[list[list[int]]] = []
    for row, item in enumerate(items):
        of_tag: list[list[int]] = [[] for _ in tags]
        for word, tag in enumerate(item.tags):
            units = [word] if grid == "word" else item.units["word"][word]
            if tag in number:
                of_tag[number[tag]] += units
                tag_of_unit[row, list(units)] = number[tag]
        members.append(of_tag)
    most = max((len(units) for of_tag in members for units in of_tag), default=0)
    padded = [[units + [-1] * (most - len(units)) for units in of_tag] for of_tag in members]
    columns = torch.tensor(padded, dtype=torch.int64).view(len(items), len(tags), most)
    # At least one column, to reduce over.
    return torch.nn.functional.pad(columns, (0, 1), value=-1), tag_of_unit


def _at_offsets(eligible: EligiblePairs, rows: Int[Tensor, " K"]) -> Float[Tensor, "K offset"]:
    """What each offset scores for some queries."""
    index, n = eligible.index, eligible.index.units.n
    candidates = eligible.candidates[index.text[rows], 0, index.unit[rows]]
    is_key = torch.zeros(len(index.text), n, dtype=torch.bool)
    is_key[index.query, index.key] = True
    named = index.unit[rows, None] + torch.tensor(OFFSETS)
    inside = (named >= 0) & (named < n)
    named = named.clamp(0, max(0, n - 1))
    exists = inside & candidates.gather(1, named)
    chance = eligible.chance_of_top()[rows]
    return torch.where(exists, is_key[rows].gather(1, named).float(), chance)
