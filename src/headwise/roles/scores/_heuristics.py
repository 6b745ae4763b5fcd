"""Heads that need no model: heuristics that a head must beat, and planted heads to be found.

They are scored like the heads of a model, under a mask that all heads share.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from headwise.kernels import HeadBlock
from headwise.roles.relations import Item, Level
from headwise.roles.scores._eligible import EligiblePairs, RelationIndex, sum_into

# Wider than the offsets that are roles: a null may use what no role claims.
OFFSETS = tuple(range(-10, 11))
RULES = ("nearest", "first", "longest", "most repeated")  # among the candidates of a choice
_MOST = 2**22  # weights of planted heads computed at once


def heuristic_names(level: Level) -> list[str]:
    """The names of the heuristics of a level that are not fitted, in their order: offsets first.

    Mentions are candidates of a choice: the one at offset −2 is the second one before the query.
    """
    if level == "mention":
        names = [f"candidate {offset:+d}" for offset in OFFSETS]
        return names + [f"{rule} candidate" for rule in RULES]
    return [f"offset {offset:+d}" for offset in OFFSETS]


def heuristic_sums(eligible: EligiblePairs) -> Float[Tensor, "cells K"]:
    """What each heuristic scores in each cell, under a mask that all heads share.

    A heuristic puts all its attention on the one candidate that it names, and spreads it over
    the candidates where it names none.
    """
    index = eligible.index
    if index.nodes.level == "mention":
        values = index.hits(_rule_scores(index, eligible.choosable), eligible.choosable)
    else:
        values = at_offsets(eligible, torch.arange(len(index.text)))
    return sum_into(values * eligible.eligible, index.cell, index.n_cells)


def _rule_scores(index: RelationIndex, allowed: Bool[Tensor, "C 1"]) -> Float[Tensor, "C K"]:
    """How rules score the candidates: one rule per offset, then `RULES`.

    The candidate at offset −2 is the second one before the query.
    """
    query = index.candidates
    mentions = [_mentions(item) for item in index.nodes.items]
    first = np.cumsum([0, *(each.shape[1] for each in mentions)])[index.text[query].numpy()]
    numbers = np.concatenate(mentions, axis=1)
    start, end, length, repeats = numbers[:, first + index.candidate.numpy()]
    own_start, own_end, *_ = numbers[:, first + index.node[query].numpy()]
    # In tokens between the ends that face each other, below 0 before the query: mentions differ in
    # length, and the distance of their first tokens would count the length of one of them.
    place = np.where(start > own_start, start - own_end, end - own_start)
    rank = _ranks(query.numpy(), place, allowed[:, 0].numpy())
    at_offset = rank[:, None] == np.array(OFFSETS)
    rules = np.stack([-np.abs(place), -start, length, repeats], axis=-1)
    return torch.from_numpy(np.concatenate([at_offset, rules], axis=-1)).float()


def _mentions(item: Item) -> Int64[np.ndarray, "4 mentions"]:
    """The first and the last token of each mention of a text, its characters, its occurrences."""
    nodes = item.nodes.get("mention", ())
    names = item.mentions or [""] * len(nodes)
    rows = (
        [min(tokens, default=0) for tokens in nodes],
        [max(tokens, default=0) for tokens in nodes],
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
        # Sorted by query and then by distance, a rank is the place behind the query's first one.
        first = np.searchsorted(query[order], query[order])
        ranks[order] = side * (np.arange(len(order)) - first + 1)
    return ranks


def at_offsets(eligible: EligiblePairs, rows: Int[Tensor, " K"]) -> Float[Tensor, "K offset"]:
    """What each offset scores for some queries."""
    index, n = eligible.index, eligible.index.nodes.n
    candidates = eligible.candidates[index.text[rows], 0, index.node[rows]]
    named = index.node[rows, None] + torch.tensor(OFFSETS)
    inside = (named >= 0) & (named < n)
    named = named.clamp(0, max(0, n - 1))
    exists = inside & candidates.gather(1, named)
    # Where an offset names no word it scores a random guess, as the rules of parts of speech do.
    chance = eligible.chance_of_top()[rows]
    return torch.where(exists, index.is_key(rows).gather(1, named).float(), chance)


def planted_sums(eligible: EligiblePairs) -> Float[Tensor, "cells 1"]:
    """What the planted head of each role scores on that role, by the definitions for all heads.

    A query of the role attends equally to the tokens of its keys, all others to every visible
    token. A role without a relation, such as evenness, has a head that attends uniformly.
    """
    index, visible = eligible.index, eligible.visible
    B, _, T, S = visible.shape
    R = len(index.roles)
    at_once = max(1, _MOST // (B * T * S))
    planted = torch.zeros(B, R)
    own = [role for role in range(R) if index.roles[role].level == index.nodes.level]
    for heads in (own[start : start + at_once] for start in range(0, len(own), at_once)):
        weights = _planted_weights(index, visible, heads)
        block = HeadBlock(slice(0, len(heads)), weights, weights.new_zeros(B, len(heads), T))
        evenness = dict.fromkeys(("entropy", "content entropy"), weights.new_ones(B, len(heads), T))
        value = eligible.value(block, evenness).view(B, R, len(heads))
        planted[:, heads] = value[:, heads, range(len(heads))]
    return planted.view(-1, 1)


def _planted_weights(
    index: RelationIndex, visible: Bool[Tensor, "B 1 T S"], roles: Sequence[int]
) -> Float[Tensor, "B h T S"]:
    """The attention of the planted heads of some roles."""
    head_of = torch.full((len(index.roles),), -1)
    head_of[roles] = torch.arange(len(roles))
    head_of[torch.tensor([role.kind == "breadth" for role in index.roles])] = -1
    query, query_token, key_token, _ = index.token_pairs
    head = head_of[index.role[query]]
    keep = head >= 0
    wanted = visible.new_zeros(visible.shape[0], len(roles), *visible.shape[2:])
    wanted[index.text[query][keep], head[keep], query_token[keep], key_token[keep]] = True
    wanted &= visible
    weights = torch.where(wanted.any(-1, keepdim=True), wanted, visible).float()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1)
