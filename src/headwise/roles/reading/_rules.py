"""Heads that no one would call learned: a fixed offset, the nearest word of a class."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.roles.reading._asked import Runs
from headwise.roles.reading._seen import Seen
from headwise.roles.relations import Grid, Item

OFFSETS = tuple(range(-10, 11))
_NOBODY = -1


def rule_names(grid: Grid, tags: Sequence[str]) -> list[str]:
    """What the rules of a grid are called, in their order."""
    names = [f"offset {by:+d}" for by in OFFSETS]
    if grid == "word":
        names += [f"nearest {tag} to the {way}" for tag in tags for way in ("left", "right")]
    return names


def rule_sums(seen: Seen, items: Sequence[Item], tags: Sequence[str]) -> Float[Tensor, "cells K"]:
    """What each rule scores in each cell, under a mask that all heads share.

    A rule names one candidate and gives it everything. Where it names nobody it guesses: it
    spreads over the candidates.
    """
    asked = seen.asked
    named = _named(seen.candidates[:, 0], asked.frame.grid, items, tags)
    of_query = named[asked.text, asked.unit]  # Q K
    hits = (of_query[asked.of] == asked.key[:, None]).float()
    guesses = (of_query == _NOBODY) * seen.chance_of_top()
    pairs = Runs.of(torch.arange(len(hits)), asked.cell[asked.of], asked.cells)
    queries = Runs.of(torch.arange(len(guesses)), asked.cell, asked.cells)
    return pairs.sums(hits, seen.eligible[asked.of]) + queries.sums(guesses, seen.eligible)


def _named(
    candidates: Bool[Tensor, "B n n"], grid: Grid, items: Sequence[Item], tags: Sequence[str]
) -> Int[Tensor, "B n K"]:
    """Whom each rule names for each query."""
    n = candidates.shape[-1]
    at = torch.arange(n)
    found = []
    for by in OFFSETS:
        there = torch.zeros_like(candidates[..., 0])
        start, end = max(0, -by), min(n, n - by)
        if start < end:
            there[:, start:end] = candidates.diagonal(by, 1, 2)
        found.append(torch.where(there, at + by, _NOBODY))
    for tag in tags if grid == "word" else ():
        those = torch.zeros(len(items), n, dtype=torch.bool)
        for row, item in enumerate(items):
            those[row, : len(item.tags)] = torch.tensor([one == tag for one in item.tags]).bool()
        found += _nearest(candidates & those[:, None], at)
    return torch.stack(found, dim=-1)


def _nearest(those: Bool[Tensor, "B n n"], at: Int[Tensor, " n"]) -> list[Int[Tensor, "B n"]]:
    """The nearest of these keys left of each query, and right of it."""
    left, right = those.tril(-1), those.triu(1)
    last = torch.where(left, at, _NOBODY).amax(-1)
    first = torch.where(right, at, len(at)).amin(-1)
    return [last, torch.where(first < len(at), first, _NOBODY)]
