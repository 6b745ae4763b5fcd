"""Heads that no one would call learned: a fixed offset, the nearest word of a class."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.roles.evaluation._eligible import EligiblePairs
from headwise.roles.evaluation._relation_index import Runs
from headwise.roles.relations import Grid, Item

OFFSETS = tuple(range(-10, 11))
_NOBODY = -1
# Among words nobody is a candidate for itself; a mention has no class.
_WHERE: Mapping[Grid, tuple[str, ...]] = {
    "token": ("to the left", "to the right", "to the left or itself"),
    "word": ("to the left", "to the right"),
    "mention": (),
}


def rule_names(grid: Grid, tags: Sequence[str]) -> list[str]:
    """What the rules of a grid are called, in their order."""
    names = [f"offset {by:+d}" for by in OFFSETS]
    return names + [f"nearest {tag} {where}" for tag in tags for where in _WHERE[grid]]


def rule_sums(
    seen: EligiblePairs, items: Sequence[Item], tags: Sequence[str]
) -> Float[Tensor, "cells K"]:
    """What each rule scores in each cell, under a mask that all heads share.

    A rule names one candidate and gives it everything. Where it names nobody it guesses: it
    spreads over the candidates. Classes are asked for where roles speak of structure.
    """
    asked, candidates = seen.asked, seen.candidates[:, 0]
    every = torch.ones(len(asked.text), dtype=torch.bool)
    offsets = _scored(seen, _at_offsets(candidates), every)
    named = _of_classes(candidates, asked.frame.grid, items, tags)
    return (
        offsets if named is None else torch.cat([offsets, _scored(seen, named, asked.structure)], 1)
    )


def _scored(
    seen: EligiblePairs, named: Int[Tensor, "B n K"], which: Bool[Tensor, " Q"]
) -> Float[Tensor, "cells K"]:
    """What rules score that name these candidates, over some of the queries."""
    asked = seen.asked
    pairs = which[asked.of]
    of, query = asked.of[pairs], torch.arange(len(which))[which]
    # Nobody's number is no key.
    hits = (named[asked.text[of], asked.unit[of]] == asked.key[pairs, None]).float()
    nobody = named[asked.text[query], asked.unit[query]] == _NOBODY
    guesses = nobody * seen.chance_of_top()[query]
    found = Runs.of(torch.arange(len(hits)), asked.cell[of], asked.cells)
    guessed = Runs.of(torch.arange(len(guesses)), asked.cell[query], asked.cells)
    eligible = seen.eligible
    return found.sums(hits, eligible[of]) + guessed.sums(guesses, eligible[query])


def _at_offsets(candidates: Bool[Tensor, "B n n"]) -> Int[Tensor, "B n K"]:
    """Whom each offset names for each query."""
    n = candidates.shape[-1]
    at = torch.arange(n)
    found = []
    for by in OFFSETS:
        there = torch.zeros_like(candidates[..., 0])
        start, end = max(0, -by), min(n, n - by)
        if start < end:
            there[:, start:end] = candidates.diagonal(by, 1, 2)
        found.append(torch.where(there, at + by, _NOBODY))
    return torch.stack(found, dim=-1)


def _of_classes(
    candidates: Bool[Tensor, "B n n"], grid: Grid, items: Sequence[Item], tags: Sequence[str]
) -> Int[Tensor, "B n K"] | None:
    """Whom the nearest of each class is for each query; None without classes."""
    if not tags or not _WHERE[grid]:
        return None
    n = candidates.shape[-1]
    found = []
    for tag in tags:
        those = torch.zeros(len(items), n, dtype=torch.bool)
        for row, item in enumerate(items):
            words = [at for at, one in enumerate(item.tags) if one == tag]
            tokens = [at for word in words for at in item.units["word"][word]]
            those[row, words if grid == "word" else tokens] = True
        found += _nearest(candidates & those[:, None])[: len(_WHERE[grid])]
    return torch.stack(found, dim=-1)


def _nearest(those: Bool[Tensor, "B n n"]) -> list[Int[Tensor, "B n"]]:
    """The nearest of these keys left of each query, right of it, and left of it or itself."""
    at = torch.arange(those.shape[-1])
    left, own = (torch.where(one, at, _NOBODY).amax(-1) for one in (those.tril(-1), those.tril()))
    first = torch.where(those.triu(1), at, len(at)).amin(-1)
    return [left, torch.where(first < len(at), first, _NOBODY), own]
