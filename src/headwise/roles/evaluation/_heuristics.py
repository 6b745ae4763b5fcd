"""Heuristics that a head must beat: a fixed offset, the nearest word of a part of speech."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.roles.evaluation._eligible import EligiblePairs
from headwise.roles.evaluation._relation_index import Segments
from headwise.roles.relations import Grid, Item

OFFSETS = tuple(range(-10, 11))
_NONE = -1  # the heuristic names no key
# A word is never its own candidate; a mention has no part of speech.
_DIRECTIONS: Mapping[Grid, tuple[str, ...]] = {
    "token": ("to the left", "to the right", "to the left or itself"),
    "word": ("to the left", "to the right"),
    "mention": (),
}


def heuristic_names(grid: Grid, tags: Sequence[str]) -> list[str]:
    """The names of the heuristics of a grid, in their order."""
    names = [f"offset {offset:+d}" for offset in OFFSETS]
    return names + [f"nearest {tag} {side}" for tag in tags for side in _DIRECTIONS[grid]]


def heuristic_sums(
    eligible: EligiblePairs, items: Sequence[Item], tags: Sequence[str]
) -> Float[Tensor, "cells K"]:
    """What each heuristic scores in each cell, under a mask that all heads share.

    A heuristic puts all its attention on the one candidate that it names, and spreads it over
    the candidates where it names none. Parts of speech are evaluated for structural roles.
    """
    index, candidates = eligible.index, eligible.candidates[:, 0]
    every = torch.ones(len(index.text), dtype=torch.bool)
    offsets = _sums(eligible, _at_offsets(candidates), every)
    nearest = _nearest_of_tags(candidates, index.units.grid, items, tags)
    if nearest is None:
        return offsets
    return torch.cat([offsets, _sums(eligible, nearest, index.structural)], 1)


def _sums(
    eligible: EligiblePairs, named: Int[Tensor, "B n K"], which: Bool[Tensor, " Q"]
) -> Float[Tensor, "cells K"]:
    """What heuristics that name these keys score, over some of the queries."""
    index = eligible.index
    pairs = which[index.query]
    pair_query, query = index.query[pairs], torch.arange(len(which))[which]
    # _NONE equals no key.
    named_key = named[index.text[pair_query], index.unit[pair_query]]
    hits = (named_key == index.key[pairs, None]).float()
    unnamed = named[index.text[query], index.unit[query]] == _NONE
    guesses = unnamed * eligible.chance_of_top()[query]
    hit_rows = Segments.of(torch.arange(len(hits)), index.cell[pair_query], index.n_cells)
    guess_rows = Segments.of(torch.arange(len(guesses)), index.cell[query], index.n_cells)
    counts = eligible.eligible
    return hit_rows.sums(hits, counts[pair_query]) + guess_rows.sums(guesses, counts[query])


def _at_offsets(candidates: Bool[Tensor, "B n n"]) -> Int[Tensor, "B n K"]:
    """The key that each offset names for each query."""
    n = candidates.shape[-1]
    position = torch.arange(n)
    keys = []
    for offset in OFFSETS:
        allowed = torch.zeros_like(candidates[..., 0])
        start, end = max(0, -offset), min(n, n - offset)
        if start < end:
            allowed[:, start:end] = candidates.diagonal(offset, 1, 2)
        keys.append(torch.where(allowed, position + offset, _NONE))
    return torch.stack(keys, dim=-1)


def _nearest_of_tags(
    candidates: Bool[Tensor, "B n n"], grid: Grid, items: Sequence[Item], tags: Sequence[str]
) -> Int[Tensor, "B n K"] | None:
    """The nearest key of each part of speech for each query; None without tags."""
    if not tags or not _DIRECTIONS[grid]:
        return None
    n = candidates.shape[-1]
    keys = []
    for tag in tags:
        tagged = torch.zeros(len(items), n, dtype=torch.bool)
        for row, item in enumerate(items):
            words = [word for word, word_tag in enumerate(item.tags) if word_tag == tag]
            tokens = [token for word in words for token in item.units["word"][word]]
            tagged[row, words if grid == "word" else tokens] = True
        keys += _nearest(candidates & tagged[:, None])[: len(_DIRECTIONS[grid])]
    return torch.stack(keys, dim=-1)


def _nearest(keys: Bool[Tensor, "B n n"]) -> list[Int[Tensor, "B n"]]:
    """The nearest of these keys left of each query, right of it, and left of it or itself."""
    position = torch.arange(keys.shape[-1])
    left, left_or_self = (
        torch.where(side, position, _NONE).amax(-1) for side in (keys.tril(-1), keys.tril())
    )
    right = torch.where(keys.triu(1), position, len(position)).amin(-1)
    return [left, torch.where(right < len(position), right, _NONE), left_or_self]
